"""Normalisation of rows, centred or not, of a tensor or of a sum: kernels and host functions of four ops.

A row stays on the chip where it fits. Backward, programs take turns at the rows, and each has one float32 sum of what it
adds to the gradients of weight and bias.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import Gpu, gpu
from kernels_reference._norm import backward_tile, forward_tile

from ._launch import configured, launch, next_power_of_2, row_blocks

Opt = Tensor | None
FEW = 1 << 20
"""Up to as many elements, a launch costs more than reading them again."""


@triton.jit
def load_row(ptr, stride, cols, mask):
    return tl.load(ptr + cols * stride, mask, other=0.0).to(tl.float32)


@triton.jit
def load_total(x_ptr, x_stride, residual_ptr, residual_stride, total_ptr, cols, mask):
    """x, or its sum with the residual, as that is rounded."""
    x = load_row(x_ptr, x_stride, cols, mask)
    if residual_ptr is not None:
        x += load_row(residual_ptr, residual_stride, cols, mask)
        x = x.to(total_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def load_scale(weight_ptr, stride, cols, mask, offset):
    scale = load_row(weight_ptr, stride, cols, mask)
    return scale if offset is None else scale + offset


@triton.jit
def squared(x, mean, mask, centred):
    if centred:
        x = tl.where(mask, x - mean, 0.0)
    return x * x


@triton.jit
def norm_fwd_kernel(
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    residual_ptr, residual_stride_m, residual_stride_n,  # (M, N), or None
    total_ptr, total_stride_m, total_stride_n,  # (M, N), their sum; or None
    weight_ptr, weight_stride,  # (N,), or None
    bias_ptr, bias_stride,  # (N,), or None
    out_ptr, out_stride_m, out_stride_n,  # (M, N)
    mean_ptr, rstd_ptr,  # (M,), the mean or None where rows are not centred
    M, N, eps, offset,
    ROUND_NORMED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    x_ptr += rows * x_stride_m
    out_ptr += rows * out_stride_m
    if residual_ptr is not None:
        residual_ptr += rows * residual_stride_m
        total_ptr += rows * total_stride_m
    cols = tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    x = load_total(x_ptr, x_stride_n, residual_ptr, residual_stride_n, total_ptr, cols, (rows < M) & (cols < N))
    EARLY: tl.constexpr = BLOCK_N <= 4096 and not LOOPED  # pyright: ignore
    if EARLY:  # They are there when they are needed; wider rows would be short of registers, and so of programs.
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + cols * weight_stride, cols < N)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + cols * bias_stride, cols < N)
    mean = 0.0
    if mean_ptr is not None:
        sums = x
        for start in range(BLOCK_N, N if LOOPED else BLOCK_N, BLOCK_N):
            at = start + cols
            sums += load_total(x_ptr, x_stride_n, residual_ptr, residual_stride_n, total_ptr, at, (rows < M) & (at < N))
        mean = tl.sum(sums, axis=1, keep_dims=True) / N
        tl.store(mean_ptr + rows, mean, rows < M)
    squares = squared(x, mean, cols < N, mean_ptr is not None)
    for start in range(BLOCK_N, N if LOOPED else BLOCK_N, BLOCK_N):
        at = start + cols
        more = load_total(x_ptr, x_stride_n, residual_ptr, residual_stride_n, total_ptr, at, (rows < M) & (at < N))
        squares += squared(more, mean, at < N, mean_ptr is not None)
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + rows, rstd, rows < M)
    for start in range(0, N if LOOPED else BLOCK_N, BLOCK_N):
        at = start + cols
        mask = (rows < M) & (at < N)
        if LOOPED:
            x = load_total(x_ptr, x_stride_n, residual_ptr, residual_stride_n, total_ptr, at, mask)
        if residual_ptr is not None:
            tl.store(total_ptr + at * total_stride_n, x, mask)
        normed = (x if mean_ptr is None else x - mean) * rstd
        if ROUND_NORMED:
            normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        if weight_ptr is not None:
            if not EARLY:
                weight = tl.load(weight_ptr + at * weight_stride, at < N)
            scale = weight.to(tl.float32)  # type: ignore[possibly-unbound]
            normed *= scale if offset is None else scale + offset
        if bias_ptr is not None:
            if not EARLY:
                bias = tl.load(bias_ptr + at * bias_stride, at < N)
            normed += bias.to(tl.float32)  # type: ignore[possibly-unbound]
        tl.store(out_ptr + at * out_stride_n, normed, mask)


@triton.jit
def norm_bwd_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_n,  # (M, N)
    grad_total_ptr, grad_total_stride_m, grad_total_stride_n,  # (M, N), added to grad_x; or None
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    weight_ptr, weight_stride,  # (N,), or None
    mean_ptr, rstd_ptr,  # (M,), the mean or None
    dots_ptr, dots_stride,  # (2, M), see below; None where a tile has whole rows
    grad_x_ptr, grad_x_stride_m, grad_x_stride_n,  # (M, N), or None
    also_ptr, also_stride_m, also_stride_n,  # (M, N), the same in another dtype; or None
    shares_ptr,  # (blocks, 2, M), the share of each block of columns in the dots; or None
    partial_ptr, partial_bias_ptr,  # (programs, N), or None
    M, N, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The dots are the means over a row of normed * grad_normed and, for centred rows, of grad_normed."""
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)
    scale = 1.0
    if weight_ptr is not None and STAGES > 1:
        scale = load_scale(weight_ptr, weight_stride, cols, cols < N, offset)
    partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    partial_bias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Programs take turns at the rows, so that those that run at once read what lies together.
    for row in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):  # type: ignore[misc]
        rows = (row + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
        mask = (rows < M) & (cols < N)
        x = load_row(x_ptr + rows * x_stride_m, x_stride_n, cols, mask)
        grad = load_row(grad_out_ptr + rows * grad_out_stride_m, grad_out_stride_n, cols, mask)
        rstd = tl.load(rstd_ptr + rows, rows < M, other=0.0)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + rows, rows < M, other=0.0)
        normed = x * rstd
        partial += grad * normed
        if partial_bias_ptr is not None:
            partial_bias += grad
        if weight_ptr is not None:
            # The widest tiles leave no registers to keep the scale in, and a single step has no use for it twice.
            grad *= scale if STAGES > 1 else load_scale(weight_ptr, weight_stride, cols, cols < N, offset)
        average = 0.0
        if dots_ptr is None:
            dot = tl.sum(grad * normed, axis=1, keep_dims=True) * (1 / N)
            if mean_ptr is not None:
                average = tl.sum(grad, axis=1, keep_dims=True) * (1 / N)
        else:
            dot = tl.load(dots_ptr + rows, rows < M, other=0.0)
            if mean_ptr is not None:
                average = tl.load(dots_ptr + dots_stride + rows, rows < M, other=0.0)
        if shares_ptr is not None:
            shares = shares_ptr + tl.program_id(1).to(tl.int64) * 2 * M + rows
            tl.store(shares, dot, rows < M)
            tl.store(shares + M, average, rows < M)
        if grad_x_ptr is not None:
            grad = grad - normed * dot if mean_ptr is None else grad - normed * dot - average
            grad *= rstd
            if grad_total_ptr is not None:
                grad += load_row(grad_total_ptr + rows * grad_total_stride_m, grad_total_stride_n, cols, mask)
            tl.store(grad_x_ptr + rows * grad_x_stride_m + cols * grad_x_stride_n, grad, mask)
            if also_ptr is not None:
                tl.store(also_ptr + rows * also_stride_m + cols * also_stride_n, grad, mask)
    at = tl.program_id(0).to(tl.int64) * N + cols
    if partial_ptr is not None:
        tl.store(partial_ptr + at, tl.sum(partial, axis=0, keep_dims=True), cols < N)
    if partial_bias_ptr is not None:
        tl.store(partial_bias_ptr + at, tl.sum(partial_bias, axis=0, keep_dims=True), cols < N)


@triton.jit
def norm_bwd_few_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_n,  # (M, N)
    grad_total_ptr, grad_total_stride_m, grad_total_stride_n,  # (M, N), added to grad_x; or None
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    weight_ptr, weight_stride,  # (N,)
    mean_ptr, rstd_ptr,  # (M,), the mean or None
    grad_x_ptr, grad_x_stride_m, grad_x_stride_n,  # (M, N)
    also_ptr, also_stride_m, also_stride_n,  # (M, N), the same in another dtype; or None
    grad_weight_ptr, grad_bias_ptr,  # (N,), the bias's or None
    M, N, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The first programs have columns of grad_weight, the others rows of grad_x: one launch, which reads all twice."""
    column = tl.program_id(0).to(tl.int64) * COLS
    if column < N:
        columns = column + tl.arange(0, COLS)[None, :]
        on_weight = tl.zeros((4096 // COLS, COLS), tl.float32)
        on_bias = tl.zeros((4096 // COLS, COLS), tl.float32)
        for start in range(0, M, 4096 // COLS):
            steps = (start + tl.arange(0, 4096 // COLS)[:, None]).to(tl.int64)
            live = (steps < M) & (columns < N)
            part = load_row(grad_out_ptr + steps * grad_out_stride_m, grad_out_stride_n, columns, live)
            value = load_row(x_ptr + steps * x_stride_m, x_stride_n, columns, live)
            if mean_ptr is not None:
                value -= tl.load(mean_ptr + steps, steps < M, other=0.0)
            on_weight += part * value * tl.load(rstd_ptr + steps, steps < M, other=0.0)
            on_bias += part
        tl.store(grad_weight_ptr + columns, tl.sum(on_weight, axis=0, keep_dims=True), columns < N)
        if grad_bias_ptr is not None:
            tl.store(grad_bias_ptr + columns, tl.sum(on_bias, axis=0, keep_dims=True), columns < N)
    else:
        rows = (tl.program_id(0) - tl.cdiv(N, COLS)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        cols = tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
        mask = (rows < M) & (cols < N)
        x = load_row(x_ptr + rows * x_stride_m, x_stride_n, cols, mask)
        grad = load_row(grad_out_ptr + rows * grad_out_stride_m, grad_out_stride_n, cols, mask)
        grad *= load_scale(weight_ptr, weight_stride, cols, cols < N, offset)
        rstd = tl.load(rstd_ptr + rows, rows < M, other=0.0)
        average = 0.0
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + rows, rows < M, other=0.0)
            average = tl.sum(grad, axis=1, keep_dims=True) * (1 / N)
        normed = x * rstd
        grad = rstd * (grad - normed * (tl.sum(grad * normed, axis=1, keep_dims=True) * (1 / N)) - average)
        if grad_total_ptr is not None:
            grad += load_row(grad_total_ptr + rows * grad_total_stride_m, grad_total_stride_n, cols, mask)
        tl.store(grad_x_ptr + rows * grad_x_stride_m + cols * grad_x_stride_n, grad, mask)
        if also_ptr is not None:
            tl.store(also_ptr + rows * also_stride_m + cols * also_stride_n, grad, mask)


@triton.jit
def sum_partials(partial_ptr, grad_ptr, programs, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, programs, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        total += tl.load(partial_ptr + rows * N + cols, (rows < programs) & (cols < N), other=0.0)
    tl.store(grad_ptr + cols, tl.sum(total, axis=0, keep_dims=True), cols < N)


@triton.jit
def sum_partials_kernel(
    partial_ptr, partial_bias_ptr,  # (programs, N), or None
    grad_weight_ptr, grad_bias_ptr,  # (N,), or None
    programs, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if partial_ptr is not None:
        sum_partials(partial_ptr, grad_weight_ptr, programs, N, BLOCK_M, BLOCK_N)
    if partial_bias_ptr is not None:
        sum_partials(partial_bias_ptr, grad_bias_ptr, programs, N, BLOCK_M, BLOCK_N)


@configured(BLOCK_M=(1, 2, 4, 8, 16, 32, 64), BLOCK_N=(4096, 8192, 16384, 32768), num_warps=(1, 2, 4, 8, 16, 32))
def norm_fwd_config(where: Gpu, M: int, N: int, itemsize: int, centred: bool, added: bool) -> dict[str, int]:
    block_m, block_n, warps = row_blocks(M, N, most=32768, looped=4096 if added else 8192)
    if centred and N <= 8192:
        block_m, warps = forward_tile(next_power_of_2(N), block_m)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": min(warps, where.warps)}


@configured(BLOCK_M=(1, 2, 4, 8, 16, 32, 64), num_warps=(1, 2, 4, 8, 16), num_stages=(1, 2, 3, 4, 5), PROGRAMS=(1, 2, 3, 4))
def norm_bwd_config(where: Gpu, M: int, N: int, itemsize: int, centred: bool, added: bool) -> dict[str, int]:
    width = min(next_power_of_2(N), 32768 // itemsize)
    tile, lanes, most_stages = backward_tile(width, few=centred and width <= 4096, added=added)
    rows = min(max(tile // width, 1), next_power_of_2(triton.cdiv(M, where.processors)))
    # As many steps ahead as half of the shared memory holds, of two tensors or three.
    ahead = where.shared // (2 * (2 + added) * rows * width * itemsize)
    warps = min(max(rows * width // lanes, 1), 8 if itemsize == 2 else 16)
    programs = 2 if centred and width <= 1024 and M * N >= 1 << 24 else 1
    return {"BLOCK_M": rows, "num_warps": warps, "num_stages": min(1 + ahead, most_stages), "PROGRAMS": programs}


def strided(t: Opt, *, dims: int = 2) -> tuple[Any, ...]:
    """A tensor that may be missing, and its strides."""
    return (t, *([0] * dims if t is None else t.stride()))


def norm_fwd(
    x: Tensor, weight: Opt, bias: Opt, eps: float, offset: float | None, out: Tensor, *, centred: bool,
    round_normed: bool = False, residual: Opt = None, total: Opt = None,
) -> tuple[Opt, Tensor]:  # fmt: skip
    """Writes to `out` and `total`; the mean, if rows are centred, and the reciprocal standard deviation."""
    M, N = x.shape
    rstd = x.new_empty(M, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    config = norm_fwd_config(x.get_device(), M, N, x.itemsize, centred, residual is not None)
    block_m, block_n = config["BLOCK_M"], min(config["BLOCK_N"], next_power_of_2(N))
    launch(
        norm_fwd_kernel, (triton.cdiv(M, block_m),), x, *x.stride(), *strided(residual), *strided(total),
        *strided(weight, dims=1), *strided(bias, dims=1), out, *out.stride(), mean, rstd, M, N, eps, offset,
        round_normed, block_m, block_n, block_n < N, num_warps=config["num_warps"],
    )  # fmt: skip
    return mean, rstd


def norm_bwd(
    grad_out: Tensor, grad_total: Opt, x: Tensor, weight: Opt, bias: Opt, mean: Opt, rstd: Tensor, offset: float | None,
    needs: Sequence[bool], also: Opt = None,
) -> tuple[Opt, Opt, Opt]:  # fmt: skip
    """The gradients of what was normalised, weight and bias, where needed; the first is written to `also`, too."""
    (M, N), device = x.shape, x.get_device()
    inputs = *strided(grad_out), *strided(grad_total), *strided(x), *strided(weight, dims=1), mean, rstd
    # Rows that do not begin at a multiple of 16 bytes are read by the element, which takes more registers.
    widest = 32768 // x.itemsize if N % 8 == 0 else 4096
    if weight is not None and M * N <= FEW and M <= 1024 and N <= widest:
        grads = torch.empty_like(x), torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        block_m, block_n, warps = row_blocks(M, N, most=widest)
        launch(
            norm_bwd_few_kernel, (triton.cdiv(M, block_m) + triton.cdiv(N, 32),), *inputs, *strided(grads[0]), *strided(also),
            *grads[1:],
            M, N, offset, block_m, block_n, 32, num_warps=max(warps, 4),
        )  # fmt: skip
        return tuple([g if need else None for g, need in zip(grads, needs, strict=True)])  # type: ignore[return-value]
    grad_x, grad_weight, grad_bias = (
        torch.empty_like(t) if t is not None and need else None for t, need in zip((x, weight, bias), needs, strict=True)
    )
    config = norm_bwd_config(device, M, N, x.itemsize, mean is not None, grad_total is not None)
    block_m, warps = config["BLOCK_M"], config["num_warps"]
    block_n = next_power_of_2(N) if N <= widest else 4096
    blocks = triton.cdiv(N, block_n)
    programs = min(triton.cdiv(M, block_m), max(config["PROGRAMS"] * gpu(device).processors // blocks, 1))
    # A program that takes a single step has nothing to read ahead, and no use for the scale in registers.
    stages = 1 if programs * block_m >= M else config["num_stages"]

    def walk(dots: Opt, grad_x: Opt, shares: Opt, *partials: Opt) -> None:
        launch(
            norm_bwd_kernel, (programs, blocks), *inputs, dots, 0 if dots is None else dots.stride(0), *strided(grad_x),
            *strided(also), shares,
            *partials, M, N, offset, block_m, block_n, stages, num_warps=warps,
        )  # fmt: skip

    partials = [None if grad is None else rstd.new_empty(programs, N) for grad in (grad_weight, grad_bias)]
    dots = None
    if grad_x is not None and blocks > 1:
        walk(None, None, shares := rstd.new_empty(blocks, 2, M), None, None)
        dots = shares.sum(0)
    walk(dots, grad_x, None, *partials)
    if grad_weight is not None or grad_bias is not None:
        grads = grad_weight, grad_bias
        launch(sum_partials_kernel, (triton.cdiv(N, 32),), *partials, *grads, programs, N, 64, 32, num_warps=8)
    return grad_x, grad_weight, grad_bias


def add_norm_bwd(
    grad_out: Tensor, grad_total: Tensor, total: Tensor, weight: Opt, bias: Opt, mean: Opt, rstd: Tensor, offset: float | None,
    needs: Sequence[bool],
) -> tuple[Opt, Opt, Opt, Opt]:  # fmt: skip
    """The gradients of both terms of the sum, weight and bias, where needed."""
    needs_x, needs_residual, *needs_rest = needs
    grad_x = torch.empty_like(grad_out) if needs_x else None
    grad_residual, grad_weight, grad_bias = norm_bwd(
        grad_out, grad_total, total, weight, bias, mean, rstd, offset, (needs_x or needs_residual, *needs_rest), also=grad_x
    )
    return grad_x, grad_residual if needs_residual else None, grad_weight, grad_bias

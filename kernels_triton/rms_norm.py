"""RMS norm: a row stays on the chip where it fits; runs of rows share one float32 sum of the weight's gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import Gpu, gpu
from kernels_reference.rms_norm import Casting, Opt, empty_out, op

from ._launch import configured, launch, next_power_of_2, row_blocks

FEW = 1 << 20
"""Up to as many elements, a launch costs more than reading them again."""


@triton.jit
def load_scale(weight_ptr, cols, mask, offset):
    return tl.load(weight_ptr + cols, mask, other=0.0).to(tl.float32) + offset


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    weight_ptr, weight_stride,  # (N,), or None
    out_ptr, out_stride_m, out_stride_n,  # (M, N)
    rstd_ptr,  # (M,)
    M, N, eps, offset,
    ROUND_NORMED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    x_ptr += rows * x_stride_m
    out_ptr += rows * out_stride_m
    cols = tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    x = tl.load(x_ptr + cols * x_stride_n, (rows < M) & (cols < N), other=0.0).to(tl.float32)
    squares = x * x
    for start in range(BLOCK_N, N if LOOPED else BLOCK_N, BLOCK_N):
        more = tl.load(x_ptr + (start + cols) * x_stride_n, (rows < M) & (start + cols < N), other=0.0).to(tl.float32)
        squares += more * more
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / N + eps)
    tl.store(rstd_ptr + rows, rstd, rows < M)
    for start in range(0, N if LOOPED else BLOCK_N, BLOCK_N):
        if LOOPED:
            x = tl.load(x_ptr + (start + cols) * x_stride_n, (rows < M) & (start + cols < N), other=0.0).to(tl.float32)
        normed = x * rstd
        if ROUND_NORMED:
            normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
        if weight_ptr is not None:
            normed *= load_scale(weight_ptr, (start + cols) * weight_stride, start + cols < N, offset)
        tl.store(out_ptr + (start + cols) * out_stride_n, normed, (rows < M) & (start + cols < N))


@triton.jit
def rms_norm_bwd_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_n,  # (M, N)
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    weight_ptr, weight_stride,  # (N,), or None
    rstd_ptr,  # (M,)
    dot_ptr,  # (M,), the mean of normed * grad_normed over each row; None where a tile has whole rows
    grad_x_ptr, grad_x_stride_m, grad_x_stride_n,  # (M, N), or None
    dots_ptr,  # (blocks, M), the share of each block of columns in that mean; or None
    partial_ptr,  # (programs, N), or None
    M, N, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)
    scale = 1.0
    if weight_ptr is not None and STAGES > 1:
        scale = load_scale(weight_ptr, cols * weight_stride, cols < N, offset)
    partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Programs take turns at the rows, so that those that run at once read what lies together.
    for row in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):  # type: ignore[misc]
        rows = (row + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + rows * x_stride_m + cols * x_stride_n, mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + rows * grad_out_stride_m + cols * grad_out_stride_n, mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, rows < M, other=0.0)
        normed = x * rstd
        partial += grad * normed
        if weight_ptr is not None:
            # The widest tiles leave no registers to keep the scale in, and a single step has no use for it twice.
            grad *= scale if STAGES > 1 else load_scale(weight_ptr, cols * weight_stride, cols < N, offset)
        if dot_ptr is None:
            dot = tl.sum(grad * normed, axis=1, keep_dims=True) * (1 / N)
        else:
            dot = tl.load(dot_ptr + rows, rows < M, other=0.0)
        if dots_ptr is not None:
            tl.store(dots_ptr + tl.program_id(1).to(tl.int64) * M + rows, dot, rows < M)
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + rows * grad_x_stride_m + cols * grad_x_stride_n, rstd * (grad - normed * dot), mask)
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(partial, axis=0, keep_dims=True), cols < N)


@triton.jit
def rms_norm_bwd_few_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_n,  # (M, N)
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    weight_ptr, weight_stride,  # (N,)
    rstd_ptr,  # (M,)
    grad_x_ptr, grad_x_stride_m, grad_x_stride_n,  # (M, N)
    grad_weight_ptr,  # (N,)
    M, N, offset, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The first programs have columns of grad_weight, the others rows of grad_x: one launch, which reads all twice."""
    column = tl.program_id(0).to(tl.int64) * COLS
    if column < N:
        columns = column + tl.arange(0, COLS)[None, :]
        total = tl.zeros((4096 // COLS, COLS), tl.float32)
        for start in range(0, M, 4096 // COLS):
            steps = (start + tl.arange(0, 4096 // COLS)[:, None]).to(tl.int64)
            live = (steps < M) & (columns < N)
            part = tl.load(x_ptr + steps * x_stride_m + columns * x_stride_n, live, other=0.0).to(tl.float32)
            part *= tl.load(grad_out_ptr + steps * grad_out_stride_m + columns * grad_out_stride_n, live, other=0.0).to(
                tl.float32
            )
            total += part * tl.load(rstd_ptr + steps, steps < M, other=0.0)
        tl.store(grad_weight_ptr + columns, tl.sum(total, axis=0, keep_dims=True), columns < N)
    else:
        rows = (tl.program_id(0) - tl.cdiv(N, COLS)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        cols = tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
        mask = (rows < M) & (cols < N)
        rstd = tl.load(rstd_ptr + rows, rows < M, other=0.0)
        normed = tl.load(x_ptr + rows * x_stride_m + cols * x_stride_n, mask, other=0.0).to(tl.float32) * rstd
        grad = tl.load(grad_out_ptr + rows * grad_out_stride_m + cols * grad_out_stride_n, mask, other=0.0).to(tl.float32)
        grad *= load_scale(weight_ptr, cols * weight_stride, cols < N, offset)
        dot = tl.sum(grad * normed, axis=1, keep_dims=True) * (1 / N)
        tl.store(grad_x_ptr + rows * grad_x_stride_m + cols * grad_x_stride_n, rstd * (grad - normed * dot), mask)


@triton.jit
def sum_partials_kernel(
    partial_ptr,  # (programs, N)
    grad_weight_ptr,  # (N,)
    programs, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, programs, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        total += tl.load(partial_ptr + rows * N + cols, (rows < programs) & (cols < N), other=0.0)
    tl.store(grad_weight_ptr + cols, tl.sum(total, axis=0, keep_dims=True), cols < N)


@configured(BLOCK_M=(1, 2, 4, 8, 16, 32, 64), BLOCK_N=(4096, 8192, 16384, 32768), num_warps=(1, 2, 4, 8, 16, 32))
def rms_norm_fwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    block_m, block_n, warps = row_blocks(M, N, most=32768)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": min(warps, where.warps)}


def stride(weight: Opt) -> int:
    return 0 if weight is None else weight.stride(0)


def rms_norm_fwd(x: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> tuple[Tensor, Tensor]:
    out, rstd = empty_out(x, weight, eps, offset, casting), x.new_empty(x.shape[0], dtype=torch.float32)
    (M, N), config = x.shape, rms_norm_fwd_config(x.get_device(), *x.shape, x.itemsize)
    block_m, block_n = config["BLOCK_M"], min(config["BLOCK_N"], next_power_of_2(N))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    launch(
        rms_norm_fwd_kernel, (triton.cdiv(M, block_m),), x, *x.stride(), weight, stride(weight), out, *out.stride(), rstd,
        M, N, float(eps), float(offset), casting == "llama", block_m, block_n, block_n < N,
        num_warps=config["num_warps"],
    )  # fmt: skip
    return out, rstd


@configured(BLOCK_M=(1, 2, 4, 8, 16, 32, 64), num_warps=(1, 2, 4, 8, 16), num_stages=(1, 2, 3, 4, 5), PROGRAMS=(1, 2, 3, 4))
def rms_norm_bwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    width = min(next_power_of_2(N), 32768 // itemsize)
    rows = min(max(4096 // width, 1), next_power_of_2(triton.cdiv(M, where.processors)))
    # As many steps ahead as half of the shared memory holds, of two tensors.
    ahead = where.shared // (4 * rows * width * itemsize)
    warps = min(max(rows * width // 512, 1), 8 if itemsize == 2 else 16)
    return {"BLOCK_M": rows, "num_warps": warps, "num_stages": min(1 + ahead, 4), "PROGRAMS": 1}


def rms_norm_bwd(grad_out: Tensor, x: Tensor, weight: Opt, rstd: Tensor, offset: float, needs: list[bool]) -> tuple[Opt, Opt]:
    M, N = x.shape
    # Rows that do not begin at a multiple of 16 bytes are read by the element, which takes more registers.
    widest = 32768 // grad_out.itemsize if N % 8 == 0 else 4096
    if weight is not None and M * N <= FEW and M <= 1024 and N <= widest:
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        block_m, block_n, warps = row_blocks(M, N, most=widest)
        launch(
            rms_norm_bwd_few_kernel, (triton.cdiv(M, block_m) + triton.cdiv(N, 32),), grad_out, *grad_out.stride(),
            x, *x.stride(), weight, stride(weight), rstd, grad_x, *grad_x.stride(), grad_weight, M, N, float(offset),
            block_m, block_n, 32, num_warps=max(warps, 4),
        )  # fmt: skip
        return grad_x if needs[0] else None, grad_weight if needs[1] else None
    grad_x = torch.empty_like(x) if needs[0] else None
    grad_weight = torch.empty_like(weight) if weight is not None and needs[1] else None
    config = rms_norm_bwd_config(x.get_device(), M, N, grad_out.itemsize)
    block_m, warps = config["BLOCK_M"], config["num_warps"]
    block_n = next_power_of_2(N) if N <= widest else 4096
    blocks = triton.cdiv(N, block_n)
    programs = min(triton.cdiv(M, block_m), max(config["PROGRAMS"] * gpu(x.get_device()).processors // blocks, 1))
    # A program that takes a single step has nothing to read ahead, and no use for the scale in registers.
    stages = 1 if programs * block_m >= M else config["num_stages"]

    def walk(dot: Opt, grad_x: Opt, dots: Opt, partial: Opt) -> None:
        launch(
            rms_norm_bwd_kernel, (programs, blocks), grad_out, *grad_out.stride(), x, *x.stride(), weight, stride(weight), rstd,
            dot, grad_x, *((0, 0) if grad_x is None else grad_x.stride()), dots, partial, M, N, float(offset),
            block_m, block_n, stages, num_warps=warps,
        )  # fmt: skip

    dot, partial = None, None if grad_weight is None else rstd.new_empty(programs, N)
    if grad_x is not None and blocks > 1:
        walk(None, None, dots := rstd.new_empty(blocks, M), None)
        dot = dots.sum(0)
    walk(dot, grad_x, None, partial)
    if grad_weight is not None:
        launch(sum_partials_kernel, (triton.cdiv(N, 32),), partial, grad_weight, programs, N, 64, 32, num_warps=8)
    return grad_x, grad_weight


rms_norm = op.implement(rms_norm_fwd, rms_norm_bwd)

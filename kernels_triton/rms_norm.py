"""RMS norm: a row stays on the chip where it fits; runs of rows share one float32 sum of the weight's gradient."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_reference.rms_norm import Casting, Opt, empty_out, op

from ._launch import launch, next_power_of_2, row_blocks


@triton.jit
def load_scale(weight_ptr, cols, mask, offset):
    return tl.load(weight_ptr + cols, mask, other=0.0).to(tl.float32) + offset


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr,  # (M, N)
    weight_ptr,  # (N,), or None
    out_ptr,  # (M, N)
    rstd_ptr,  # (M,)
    M,
    N,
    x_stride_m,
    x_stride_n,
    weight_stride,
    out_stride_m,
    out_stride_n,
    eps,
    offset,
    ROUND_NORMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOOPED: tl.constexpr,
):
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
    grad_out_ptr,  # (M, N)
    x_ptr,  # (M, N)
    weight_ptr,  # (N,), or None
    rstd_ptr,  # (M,)
    dot_ptr,  # (M,), the mean of normed * grad_normed over each row; None where a tile has whole rows
    grad_x_ptr,  # (M, N), or None
    dots_ptr,  # (blocks, M), the share of each block of columns in that mean; or None
    partial_ptr,  # (programs, N), or None
    M,
    N,
    run,
    grad_out_stride_m,
    grad_out_stride_n,
    x_stride_m,
    x_stride_n,
    weight_stride,
    grad_x_stride_m,
    grad_x_stride_n,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * run
    scale = 1.0
    if weight_ptr is not None and STAGES > 1:
        scale = load_scale(weight_ptr, cols * weight_stride, cols < N, offset)
    partial = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in tl.range(first, tl.minimum(first + run, M), BLOCK_M, num_stages=STAGES):  # type: ignore[misc]
        rows = row + tl.arange(0, BLOCK_M)[:, None]
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
            dot = tl.sum(grad * normed, axis=1, keep_dims=True) / N
        else:
            dot = tl.load(dot_ptr + rows, rows < M, other=0.0)
        if dots_ptr is not None:
            tl.store(dots_ptr + tl.program_id(1).to(tl.int64) * M + rows, dot, rows < M)
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + rows * grad_x_stride_m + cols * grad_x_stride_n, rstd * (grad - normed * dot), mask)
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(partial, axis=0, keep_dims=True), cols < N)


@triton.jit
def sum_partials_kernel(
    partial_ptr,  # (programs, N)
    grad_weight_ptr,  # (N,)
    programs,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, programs, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
        total += tl.load(partial_ptr + rows * N + cols, (rows < programs) & (cols < N), other=0.0)
    tl.store(grad_weight_ptr + cols, tl.sum(total, axis=0, keep_dims=True), cols < N)


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def rms_norm_fwd(x: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> tuple[Tensor, Tensor]:
    out, rstd = empty_out(x, weight, eps, offset, casting), x.new_empty(x.shape[0], dtype=torch.float32)
    (M, N), (block_m, block_n, warps) = x.shape, row_blocks(*x.shape, most=32768)
    strides = *x.stride(), 0 if weight is None else weight.stride(0), *out.stride()
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    options = float(eps), float(offset), casting == "llama", block_m, block_n, block_n < N
    launch(rms_norm_fwd_kernel, (triton.cdiv(M, block_m),), x, weight, out, rstd, M, N, *strides, *options, num_warps=warps)
    return out, rstd


def rms_norm_bwd(grad_out: Tensor, x: Tensor, weight: Opt, rstd: Tensor, offset: float, needs: list[bool]) -> tuple[Opt, Opt]:
    M, N = x.shape
    grad_x = torch.empty_like(x) if needs[0] else None
    grad_weight = torch.empty_like(weight) if weight is not None and needs[1] else None
    # Rows that do not begin at a multiple of 16 bytes are read by the element, which takes more registers.
    widest = 32768 // grad_out.itemsize if N % 8 == 0 else 4096
    block_n = next_power_of_2(N) if widest >= N else 4096
    blocks = triton.cdiv(N, block_n)
    most = max(1, processors(x.device) * (2 if block_n <= 4096 else 1) // blocks)
    block_m = min(max(4096 // block_n, 1), next_power_of_2(triton.cdiv(M, most)))
    run = triton.cdiv(M, block_m * most) * block_m
    programs, tile = triton.cdiv(M, run), block_m * block_n
    stages = 1 if tile > 8192 or run == block_m else min(3, 1 + 65536 // (tile * (x.itemsize + grad_out.itemsize)))
    warps = min(max(tile // 512, 1), 16)

    def walk(dot: Opt, grad_x: Opt, dots: Opt, partial: Opt) -> None:
        tensors = grad_out, x, weight, rstd, dot, grad_x, dots, partial
        strides = *grad_out.stride(), *x.stride(), 0 if weight is None else weight.stride(0)
        options = *((0, 0) if grad_x is None else grad_x.stride()), float(offset), block_m, block_n, stages
        launch(rms_norm_bwd_kernel, (programs, blocks), *tensors, M, N, run, *strides, *options, num_warps=warps)

    dot, partial = None, None if grad_weight is None else rstd.new_empty(programs, N)
    if grad_x is not None and blocks > 1:
        walk(None, None, dots := rstd.new_empty(blocks, M), None)
        dot = dots.sum(0)
    walk(dot, grad_x, None, partial)
    if grad_weight is not None:
        rows = min(next_power_of_2(programs), 128)
        launch(sum_partials_kernel, (triton.cdiv(N, 4096 // rows),), partial, grad_weight, programs, N, rows, 4096 // rows)
    return grad_x, grad_weight


rms_norm = op.implement(rms_norm_fwd, rms_norm_bwd)

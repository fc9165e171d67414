"""Softmax: a row stays on the chip where it fits, and is read twice where it does not."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels_reference.softmax import op

from ._launch import launch, row_blocks


@triton.jit
def softmax_fwd_kernel(
    x_ptr,  # (M, N)
    out_ptr,  # (M, N)
    M,
    N,
    x_stride_m,
    x_stride_n,
    out_stride_m,
    out_stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOOPED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    x_ptr += rows * x_stride_m
    out_ptr += rows * out_stride_m
    if LOOPED:
        running_max = tl.full((BLOCK_M, 1), float("-inf"), tl.float32)
        running_sum = tl.zeros((BLOCK_M, 1), tl.float32)
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            x = tl.load(x_ptr + cols.to(tl.int64) * x_stride_n, (rows < M) & (cols < N), other=float("-inf")).to(tl.float32)
            new_max = tl.maximum(running_max, tl.max(x, axis=1, keep_dims=True))
            # A row that begins with -inf has no finite maximum yet; subtracting it from itself would make NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            running_sum = running_sum * libdevice.exp(running_max - shift) + tl.sum(
                libdevice.exp(x - shift), axis=1, keep_dims=True
            )
            running_max = new_max
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            mask = (rows < M) & (cols < N)
            x = tl.load(x_ptr + cols.to(tl.int64) * x_stride_n, mask, other=float("-inf")).to(tl.float32)
            tl.store(out_ptr + cols.to(tl.int64) * out_stride_n, libdevice.exp(x - running_max) / running_sum, mask)
    else:
        cols = tl.arange(0, BLOCK_N)[None, :]
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + cols.to(tl.int64) * x_stride_n, mask, other=float("-inf")).to(tl.float32)
        e = libdevice.exp(x - tl.max(x, axis=1, keep_dims=True))  # pyright: ignore
        tl.store(out_ptr + cols.to(tl.int64) * out_stride_n, e / tl.sum(e, axis=1, keep_dims=True), mask)  # pyright: ignore


@triton.jit
def softmax_bwd_kernel(
    grad_out_ptr,  # (M, N)
    out_ptr,  # (M, N)
    grad_x_ptr,  # (M, N)
    M,
    N,
    grad_out_stride_m,
    grad_out_stride_n,
    out_stride_m,
    out_stride_n,
    grad_x_stride_m,
    grad_x_stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOOPED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    grad_out_ptr += rows * grad_out_stride_m
    out_ptr += rows * out_stride_m
    grad_x_ptr += rows * grad_x_stride_m
    dot = tl.zeros((BLOCK_M, 1), tl.float32)
    for start in range(0, N if LOOPED else BLOCK_N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)[None, :]
        mask = (rows < M) & (cols < N)
        grad_out = tl.load(grad_out_ptr + cols.to(tl.int64) * grad_out_stride_n, mask, other=0.0).to(tl.float32)
        out = tl.load(out_ptr + cols.to(tl.int64) * out_stride_n, mask, other=0.0).to(tl.float32)
        dot += tl.sum(grad_out * out, axis=1, keep_dims=True)
        if not LOOPED:
            tl.store(grad_x_ptr + cols.to(tl.int64) * grad_x_stride_n, out * (grad_out - dot), mask)
    if LOOPED:
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)[None, :]
            mask = (rows < M) & (cols < N)
            grad_out = tl.load(grad_out_ptr + cols.to(tl.int64) * grad_out_stride_n, mask, other=0.0).to(tl.float32)
            out = tl.load(out_ptr + cols.to(tl.int64) * out_stride_n, mask, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + cols.to(tl.int64) * grad_x_stride_n, out * (grad_out - dot), mask)


def softmax_fwd(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    M, N = x.shape
    block_m, block_n, warps = row_blocks(M, N, most=32768)
    launch(
        softmax_fwd_kernel,
        (triton.cdiv(M, block_m),),
        x,
        out,
        M,
        N,
        *x.stride(),
        *out.stride(),
        block_m,
        block_n,
        block_n < N,
        num_warps=warps,
    )
    return out


def softmax_bwd(grad_out: Tensor, out: Tensor) -> Tensor:
    grad_x = torch.empty_like(out)
    M, N = out.shape
    block_m, block_n, warps = row_blocks(M, N, most=16384)
    launch(
        softmax_bwd_kernel,
        (triton.cdiv(M, block_m),),
        grad_out,
        out,
        grad_x,
        M,
        N,
        *grad_out.stride(),
        *out.stride(),
        *grad_x.stride(),
        block_m,
        block_n,
        block_n < N,
        num_warps=warps,
    )
    return grad_x


softmax = op.implement(softmax_fwd, softmax_bwd)

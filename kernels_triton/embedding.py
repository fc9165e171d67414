"""Rows of a table: a copy forward; backward each row that is named adds what its places were given."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference.embedding import by_row, empty_out, op, row_of_padding

from ._launch import configured, launch, next_power_of_2


@triton.jit
def embedding_fwd_kernel(
    index_ptr,  # (M,)
    weight_ptr, weight_stride_v, weight_stride_d,  # (V, D)
    out_ptr,  # (M, D), contiguous
    M, V, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]).to(tl.int64)
    index = tl.load(index_ptr + rows, rows < M, other=0).to(tl.int64)
    known = (index >= 0) & (index < V)
    value = tl.load(weight_ptr + index * weight_stride_v + cols * weight_stride_d, known & (cols < D), other=float("nan"))
    tl.store(out_ptr + rows * D + cols, value, (rows < M) & (cols < D))


@triton.jit
def embedding_bwd_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_d,  # (M, D)
    rows_ptr, order_ptr, begin_ptr, end_ptr,  # (M,), see by_row
    grad_weight_ptr, grad_weight_stride_v, grad_weight_stride_d,  # (V, D), zeros
    V, D, padding, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The first of the places of a row adds all of them up."""
    first = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + first).to(tl.int64)
    if (tl.load(begin_ptr + first) == first) & (row != padding) & (row >= 0) & (row < V):
        cols = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]).to(tl.int64)
        end = tl.load(end_ptr + first)
        total = tl.zeros((1, BLOCK_D), tl.float32)
        for start in range(first, end, BLOCK_M):
            places = start + tl.arange(0, BLOCK_M)[:, None]
            source = tl.load(order_ptr + places, places < end, other=0)
            mask = (places < end) & (cols < D)
            grad = tl.load(grad_out_ptr + source * grad_out_stride_m + cols * grad_out_stride_d, mask, other=0.0)
            total += tl.sum(grad.to(tl.float32), axis=0, keep_dims=True)
        tl.store(grad_weight_ptr + row * grad_weight_stride_v + cols * grad_weight_stride_d, total, cols < D)


@configured(BLOCK_M=(1, 2, 4, 8, 16), BLOCK_D=(256, 512, 1024, 2048, 4096, 8192), num_warps=(1, 2, 4, 8))
def embedding_fwd_config(where: Gpu, M: int, D: int, itemsize: int) -> dict[str, int]:
    width = min(next_power_of_2(D), 4096)
    rows = max(1, min(4096 // width, next_power_of_2(M) // 512, 16))
    return {"BLOCK_M": rows, "BLOCK_D": width, "num_warps": min(max(rows * width // 512, 1), 8)}


@configured(BLOCK_M=(1, 2, 4, 8, 16), BLOCK_D=(256, 512, 1024, 2048, 4096), num_warps=(1, 2, 4, 8))
def embedding_bwd_config(where: Gpu, M: int, D: int, itemsize: int) -> dict[str, int]:
    width = min(next_power_of_2(D), 1024)
    return {"BLOCK_M": 4, "BLOCK_D": width, "num_warps": min(max(width // 256, 1), 4)}


def embedding_fwd(index: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    (V, D), M, out = weight.shape, index.numel(), empty_out(index, weight)
    config = embedding_fwd_config(weight.get_device(), M, D, weight.itemsize)
    block_m, block_d = config["BLOCK_M"], min(config["BLOCK_D"], next_power_of_2(D))
    grid = triton.cdiv(M, block_m), triton.cdiv(D, block_d)
    index = index.reshape(-1)
    launch(
        embedding_fwd_kernel, grid, index, weight, *weight.stride(), out, M, V, D, block_m, block_d,
        num_warps=config["num_warps"],
    )  # fmt: skip
    return out


def embedding_bwd(grad_out: Tensor, index: Tensor, weight: Tensor, padding_idx: int | None, needs: list[bool]) -> tuple[Tensor]:
    (V, D), M, grad_weight = weight.shape, index.numel(), torch.zeros_like(weight)
    config = embedding_bwd_config(weight.get_device(), M, D, weight.itemsize)
    block_d = min(config["BLOCK_D"], next_power_of_2(D))
    grad_out = grad_out.reshape(-1, D)
    launch(
        embedding_bwd_kernel, (M, triton.cdiv(D, block_d)), grad_out, *grad_out.stride(), *by_row(index), grad_weight,
        *grad_weight.stride(), V, D, row_of_padding(weight, padding_idx), config["BLOCK_M"], block_d,
        num_warps=config["num_warps"],
    )  # fmt: skip
    return (grad_weight,)


embedding = op.implement(embedding_fwd, embedding_bwd)

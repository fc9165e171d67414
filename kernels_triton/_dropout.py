"""The kernel of dropout, with a residual sum or without: over tiles in any strides, or over one long row."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import Choice
from kernels_reference._dropout import Maybe, scale_of, threshold_of

from ._launch import launch, next_power_of_2, tile_width

SPACE = {"TILE": (512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16)}


@triton.jit
def mix(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def random_bits(seed, low, high):
    """Of an element, from the halves of its index; `low` may be one half of a tile's, `high` is often one for all."""
    key0 = mix(seed.to(tl.uint32) + 0x9E3779B9)
    key1 = mix((seed >> 32).to(tl.uint32) ^ key0)
    h = low ^ key0
    h ^= h >> 16
    h = h * 0x7FEB352D + (key1 + high * 0x85EBCA6B)
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def drop(out_ptr, copy_ptr, x_ptr, residual_ptr, seed_ptr, threshold, scale, low, high, mask):
    # All loads first: what follows is computed while they are on their way.
    x = tl.load(x_ptr, mask)
    residual = None if residual_ptr is None else tl.load(residual_ptr, mask).to(tl.float32)
    value = x.to(tl.float32)
    if threshold is None:
        value = tl.zeros_like(value)
    else:
        # Before the product: behind it, the selection would be of halves of registers.
        value = tl.where(random_bits(tl.load(seed_ptr), low, high) >= threshold.to(tl.uint32), value, 0.0) * scale
    if residual is not None:
        value += residual
    tl.store(out_ptr, value, mask)
    if copy_ptr is not None:
        tl.store(copy_ptr, x, mask)


@triton.jit(do_not_specialize=["threshold"])
def dropout_kernel(
    out_ptr,  # (A, M, N)
    copy_ptr,  # (A, M, N), written as x is, or None
    x_ptr,  # (A, M, N)
    residual_ptr,  # (A, M, N), or None
    like_ptr,  # (1,), written to, or None
    seed_ptr,  # (1,)
    M, N, out_a, out_m, out_n, copy_a, copy_m, copy_n, x_a, x_m, x_n, residual_a, residual_m, residual_n,
    index_a, index_m, index_n,
    threshold,  # None where nothing is kept
    scale, ONE_ROW: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if like_ptr is not None:
        tl.store(like_ptr, 0.0, tl.program_id(0) == 0)
    n_blocks = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(M, BLOCK_M) * n_blocks
    a, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    row, col = (block // n_blocks).to(tl.int64) * BLOCK_M, (block % n_blocks).to(tl.int64) * BLOCK_N
    row_steps, col_steps = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    rows, cols = row + row_steps, col + col_steps
    out_ptr += a * out_a + rows * out_m + cols * out_n
    x_ptr += a * x_a + rows * x_m + cols * x_n
    if copy_ptr is not None:
        copy_ptr += a * copy_a + rows * copy_m + cols * copy_n
    if residual_ptr is not None:
        residual_ptr += a * residual_a + rows * residual_m + cols * residual_n
    if WIDE:
        index = a * index_a + rows * index_m + cols * index_n
        low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    elif ONE_ROW:
        # The tile's lower bits are free in its first index.
        low, high = col.to(tl.uint32) ^ col_steps.to(tl.uint32), (col >> 32).to(tl.uint32)
    else:
        first = a * index_a + row * index_m + col * index_n
        low, high = first.to(tl.uint32) + (row_steps * index_m + col_steps * index_n).to(tl.uint32), (first >> 32).to(tl.uint32)
    # A mask over a size that 16 does not divide makes every access a single element; whole tiles do without.
    if (row + BLOCK_M <= M) & (col + BLOCK_N <= N):
        drop(out_ptr, copy_ptr, x_ptr, residual_ptr, seed_ptr, threshold, scale, low, high, None)
    else:
        mask = (rows < M) & (cols < N)
        drop(out_ptr, copy_ptr, x_ptr, residual_ptr, seed_ptr, threshold, scale, low, high, mask)


def over_tiles(choice: Choice, p: float, seed: Tensor, like: Maybe, tensors: list[Any], steps: list[int]) -> None:
    """Launches on tensors of shape (A, M, N), of which the first is `out`; the steps are the strides of the index."""
    lead, strides = tensors[0], [(0, 0, 0) if t is None else t.stride() for t in tensors]
    A, M, N = lead.shape
    one_row = A * M == 1 and all(t is None or stride[2] == 1 for t, stride in zip(tensors, strides, strict=True))
    column_major = any(stride[1] == 1 for stride in strides)
    config = choice(lead.get_device(), A * M, N, lead.itemsize, column_major)
    tile, threshold = config["TILE"], threshold_of(p)
    block_n = tile if one_row else tile_width(N, tile, column_major)
    block_m = 1 if one_row else min(tile // block_n, next_power_of_2(M))
    last = sum((n - 1) * step for n, step in zip(lead.shape, steps, strict=True))
    options = threshold if threshold < 2**32 else None, scale_of(p), one_row, last >= 2**32 and not one_row, block_m, block_n
    grid = (A * triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)
    arguments = *tensors, like, seed, M, N, *(s for stride in strides for s in stride), *steps, *options
    launch(dropout_kernel, grid, *arguments, num_warps=config["num_warps"])

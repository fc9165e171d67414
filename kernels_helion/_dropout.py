"""The kernel of dropout, with a residual sum or without: over tiles in any strides, or over rows of eight.

The 32 random bits of an element are an int32, whose products wrap: unsigned integers are not Helion's, and 64 bits slow.
"""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._dropout import Maybe, scale_of, threshold_of

from ._kernel import Kernel, column_major, kernel, next_power_of_2, tile_width


def sizes(out: Tensor, *others: Any) -> dict[str, int]:
    A, M, N = out.shape
    return {"M": A * M, "N": N, "itemsize": out.itemsize, "column_major": column_major(out, *others)}


def tile_config(out: Tensor, *others: Any, tile: int = 2048) -> dict[str, Any]:
    _, M, N = out.shape
    block_n = tile_width(M, N, tile, column_major(out, *others))
    # A dimension of 1 takes a block of 1: Helion 1.5.0 lets every lane store to it, those beyond the end too.
    return {"block_sizes": [min(tile // block_n, next_power_of_2(M)), block_n], "num_warps": 4}


def mix(h: Tensor) -> Tensor:
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * 0x7FEB352D
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * (0x846CA68B - 2**32)
    return h ^ ((h >> 16) & 0xFFFF)


def random_bits(index: Tensor, wide: bool | None, seed: Tensor) -> Tensor:
    """Of the elements of these indices; not `wide`, they are less than 2**32."""
    key0 = mix(seed.to(torch.int32) + (0x9E3779B9 - 2**32))
    h = index.to(torch.int32) ^ key0
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * 0x7FEB352D + mix((seed >> 32).to(torch.int32) ^ key0)
    if wide is not None:
        h = h + (index >> 32).to(torch.int32) * (0x85EBCA6B - 2**32)
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * (0x846CA68B - 2**32)
    return h ^ ((h >> 16) & 0xFFFF)


def dropout_kernel(
    out: Tensor, copy: Maybe, x: Tensor, residual: Maybe, like: Maybe, seed: Tensor, steps: Any, threshold: int | None,
    scale: float, eights: bool | None, wide: bool | None,
) -> None:  # fmt: skip
    """The threshold is compared as signed numbers are; None where nothing is kept."""
    a, m, n = out.size()
    if eights is not None:
        n = hl.specialize(n)  # Nor would alignment be known without the strides.
        hl.specialize((out.stride(1), x.stride(1)))
        if copy is not None:
            _ = hl.specialize(copy.stride(1))
        if residual is not None:
            _ = hl.specialize(residual.stride(1))
    for batch, rows, cols in hl.tile([a, m, n], block_size=[1, None, None]):
        loaded = x[batch.begin, rows, cols]
        value = loaded.float()
        if threshold is None:
            value = torch.zeros_like(value)
        else:
            if eights is not None:
                index = (rows.index * 8).unsqueeze(1) ^ cols.index.unsqueeze(0)  # What all eight share is computed once.
            else:
                index = (rows.index * steps[1]).unsqueeze(1) + (cols.index * steps[2]).unsqueeze(0) + batch.begin * steps[0]
            bits = random_bits(index, wide, hl.load(seed, [0]))
            # Before the product: behind it, the selection would be of halves of registers.
            value = torch.where((bits ^ -(2**31)) >= threshold, value, 0.0) * scale
        if residual is not None:
            value = value + residual[batch.begin, rows, cols].float()
        out[batch.begin, rows, cols] = value.to(out.dtype)
        if copy is not None:
            copy[batch.begin, rows, cols] = loaded
        if like is not None:
            first = rows.index + cols.begin + batch.begin == 0
            hl.store(like, [rows.index], torch.zeros_like(rows.index).to(like.dtype), extra_mask=first)


def named(name: str) -> Kernel[..., None]:
    """The kernel, with configurations of its own."""
    return kernel(tile_config, sizes, name=name)(dropout_kernel)


def over_tiles(
    kernel: Kernel[..., None], p: float, seed: Tensor, like: Maybe, tensors: list[Any], steps: list[int]
) -> None:  # fmt: skip
    """Launches on tensors of shape (A, M, N), of which the first is `out`; the steps are the strides of the index."""
    lead, eights, threshold = tensors[0], None, threshold_of(p)
    last = sum((n - 1) * step for n, step in zip(lead.shape, steps, strict=True))
    if lead.numel() % 8 == 0 and all(t is None or t.stride() == (0, 0, 1) for t in tensors):
        # Then no width is too narrow for a tile, and no mask divides 16 bytes.
        eights = True
        tensors = [None if t is None else t.as_strided((1, lead.numel() // 8, 8), (0, 8, 1)) for t in tensors]
    signed = threshold - 2**31 if threshold < 2**32 else None
    options = tuple(steps), signed, scale_of(p), eights, last >= 2**32 or None
    kernel(*tensors, None if like is None else like.as_strided((1,), (1,)), seed.view(1), *options)

"""A running maximum and sum of exponentials, kept by each lane of a tile on its own: no step waits for other warps."""

import triton
import triton.language as tl

from ._launch import next_power_of_2

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(highest):
    """What to subtract: not an infinite maximum, since inf - inf is NaN."""
    return tl.where(tl.abs(highest) == float("inf"), 0.0, highest)


@triton.jit
def online_step(highest, total, z, axis):
    """The maximum, in units of log(2), and the sum, with the values of `z` along an axis added to them."""
    before = highest
    highest = tl.maximum(highest, tl.max(z, axis) * LOG2E)
    shift = finite(highest)
    added = tl.exp2(tl.fma(z, LOG2E, -tl.expand_dims(shift, axis)))
    return highest, total * tl.exp2(before - shift) + tl.sum(added, axis)


def blocks(M: int, V: int, most: int) -> dict[str, int]:
    """Short rows share a tile where there are enough to fill a GPU."""
    width = min(max(next_power_of_2(V), 4), most)
    rows = max(1, min(4096 // width, next_power_of_2(M) // 512, 64))
    return {"BLOCK_M": rows, "BLOCK_V": width, "num_warps": max(width // 1024, 4)}

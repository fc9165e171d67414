"""A running maximum and sum of exponentials, kept by each lane of a tile on its own: no step waits for other warps."""

import triton
import triton.language as tl

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

"""What the kernels of group norm share: memory formats, and which channels and positions a program has."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._config import next_power_of_2

Opt = Tensor | None
WHOLE = 1 << 17
"""Up to as many bytes, a group is read a second time from the caches next to the processor."""


def is_whole(x: Tensor, K: int) -> bool:
    """Whether a program has a whole group, K channels of x (N, C, P)."""
    return not side_by_side(x) and K <= 1024 and K * x.shape[2] * x.itemsize <= WHOLE


def side_by_side(x: Tensor) -> bool:
    """Whether the channels of a position are."""
    return x.shape[2] > 1 and x.stride(1) == 1


def split(x: Tensor, *, tile: int, programs: int) -> tuple[int, int, int]:
    """For x (N, C, P) in tiles of `tile` elements and about as many programs: the channels of a tile, a power of two, the
    positions of a program, a multiple of a tile's, and in how many parts these are all."""
    N, C, P = x.shape
    # Powers of two that divide a size leave no lane idle.
    width = min(max(P & -P, 256), next_power_of_2(P), tile)
    channels = min(min(max(C & -C, 32), 128) if side_by_side(x) else tile // width, next_power_of_2(C))
    width = tile // channels
    steps = -(-P // width)
    length = -(-steps // min(-(-programs // (N * -(-C // channels))), steps)) * width
    return channels, length, -(-P // length)


def flat(t: Tensor) -> Tensor:
    """(N, C, P): a view where one stride leads from each position to the next, as it does in channels_last, too."""
    return t.reshape(*t.shape[:2], t.shape[2:].numel())


def is_even(t: Tensor) -> bool:
    """Whether that is a view."""
    dims = [(size, stride) for size, stride in zip(t.shape[2:], t.stride()[2:], strict=True) if size > 1]
    return all(stride == size * step for (_, stride), (size, step) in itertools.pairwise(dims))


def room_for(t: Tensor) -> Tensor:
    """What kernels write instead of `t`: (N, C, P)."""
    return flat(t) if is_even(t) else t.new_empty(*t.shape[:2], t.shape[2:].numel())


def filled(t: Tensor, room: Tensor) -> Tensor:
    """`t`, once its room has been written."""
    return t if is_even(t) else t.copy_(room.view(t.shape))


Normalise = Callable[[Tensor, Opt, int, Opt, Opt, Tensor, Tensor, float | None, Opt, tuple[Opt, Opt]], None]
"""Of x, grad or None, the number of groups, weight, bias, mean, rstd, eps or None backward, and what is to be written:
`out` or grad_x and the gradients of weight and bias, those that are there; forward mean and rstd, too."""


def host(normalise: Normalise) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of a package."""

    def group_norm_fwd(x: Tensor, num_groups: int, weight: Opt, bias: Opt, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, mean = torch.empty_like(x), x.new_empty(x.shape[0], num_groups, dtype=torch.float32)
        room, rstd = room_for(out), torch.empty_like(mean)
        normalise(flat(x), None, num_groups, weight, bias, mean, rstd, float(eps), room, (None, None))
        return filled(out, room), mean, rstd

    def group_norm_bwd(
        grad_out: Tensor, x: Tensor, num_groups: int, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, needs: list[bool]
    ) -> tuple[Opt, Opt, Opt]:
        grad_x, grad_weight, grad_bias = (
            torch.empty_like(t) if t is not None and need else None for t, need in zip((x, weight, bias), needs, strict=True)
        )
        room, grads = None if grad_x is None else room_for(grad_x), (grad_weight, grad_bias)
        normalise(flat(x), flat(grad_out), num_groups, weight, None, mean, rstd, None, room, grads)
        return grad_x if grad_x is None or room is None else filled(grad_x, room), *grads

    return group_norm_fwd, group_norm_bwd

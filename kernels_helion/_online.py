"""A running maximum and sum of exponentials, kept by each lane of a tile on its own: no step waits for other warps."""

from math import log2
from typing import Any

import torch
from torch import Tensor


def scaled(x: Any) -> Any:
    return x * log2(2.718281828459045)


def finite(highest: Tensor) -> Tensor:
    """What to subtract: not an infinite maximum, since inf - inf is NaN."""
    return torch.where(torch.abs(highest) == float("inf"), 0.0, highest)


def online_step(highest: Tensor, total: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum, in units of log(2), and the sum, (rows, lanes), with the values of `z`, (rows, steps, lanes), added."""
    new = torch.maximum(scaled(torch.amax(z, dim=1)), highest)
    shift = finite(new)
    return new, torch.exp2(scaled(z) - shift.unsqueeze(1)).sum(dim=1) + torch.exp2(highest - shift) * total

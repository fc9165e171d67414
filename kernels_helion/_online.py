"""A running maximum and sum of exponentials, kept by each lane of a tile on its own: no step waits for other warps."""

from math import log2
from typing import Any

import torch
from torch import Tensor

from ._kernel import next_power_of_2


def tile(x: Tensor, most: int) -> dict[str, Any]:
    """Rows and columns of a tile; short rows share one where there are enough to fill a GPU."""
    M, V = x.shape
    width = min(max(next_power_of_2(V), 16), most)
    rows = max(1, min(4096 // width, next_power_of_2(M) // 512, 64))
    return {"block_sizes": [rows, width], "num_warps": max(width // 1024, 4)}


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

"""Dropout: one kernel, forward on `x` and backward on its gradient."""

from functools import partial

from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference._dropout import dropout_like
from kernels_reference.dropout import op

from ._dropout import SPACE, over_tiles
from ._launch import configured


@configured(**SPACE)
def dropout_config(where: Gpu, M: int, N: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 2048, "num_warps": 4}


launch = partial(over_tiles, dropout_config)


def dropout_fwd(x: Tensor, p: float, seed: Tensor) -> Tensor:
    return dropout_like(launch, x, p, seed)


def dropout_bwd(grad_out: Tensor, p: float, seed: Tensor, needs: list[bool]) -> Tensor:
    return dropout_like(launch, grad_out, p, seed)


dropout = op.implement(dropout_fwd, dropout_bwd)

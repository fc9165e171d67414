"""Dropout: one kernel, forward on `x` and backward on its gradient."""

from functools import partial

from torch import Tensor

from kernels_reference._dropout import dropout_like
from kernels_reference.dropout import op

from ._dropout import named, over_tiles

dropout_kernel = named("dropout_kernel")
launch = partial(over_tiles, dropout_kernel)


def dropout_fwd(x: Tensor, p: float, seed: Tensor) -> Tensor:
    return dropout_like(launch, x, p, seed)


def dropout_bwd(grad_out: Tensor, p: float, seed: Tensor, needs: list[bool]) -> Tensor:
    return dropout_like(launch, grad_out, p, seed)


dropout = op.implement(dropout_fwd, dropout_bwd)

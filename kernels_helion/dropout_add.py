"""Dropout and a residual sum: the kernel of dropout, with the residual read, or its gradient written."""

from functools import partial

from torch import Tensor

from kernels_reference._dropout import Maybe, dropout_onto, dropout_onto_backward
from kernels_reference.dropout_add import like, op

from ._dropout import named, over_tiles

dropout_add_fwd_kernel, dropout_add_bwd_kernel = named("dropout_add_fwd_kernel"), named("dropout_add_bwd_kernel")


def dropout_add_fwd(x: Tensor, residual: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    empty = like(x)
    return dropout_onto(partial(over_tiles, dropout_add_fwd_kernel), x, residual, empty, p, seed), empty


def dropout_add_bwd(grad_out: Tensor, like: Tensor, p: float, seed: Tensor, needs: list[bool]) -> tuple[Maybe, Maybe]:
    return dropout_onto_backward(partial(over_tiles, dropout_add_bwd_kernel), grad_out, like, p, seed, needs)


dropout_add = op.implement(dropout_add_fwd, dropout_add_bwd)

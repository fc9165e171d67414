"""Dropout: one kernel, forward on `x` and backward on its gradient."""

from torch import Tensor

from kernels_reference.dropout import op

from ._dropout import dropout_like, named

dropout_kernel = named("dropout_kernel")


def dropout_fwd(x: Tensor, p: float, seed: Tensor) -> Tensor:
    return dropout_like(dropout_kernel, x, p, seed)


def dropout_bwd(grad_out: Tensor, p: float, seed: Tensor, needs: list[bool]) -> Tensor:
    return dropout_like(dropout_kernel, grad_out, p, seed)


dropout = op.implement(dropout_fwd, dropout_bwd)

"""Dropout and a residual sum: the kernel of dropout, with the residual read, or its gradient written."""

import torch
from torch import Tensor

from kernels_reference._dropout import Maybe
from kernels_reference.dropout_add import like, op

from ._dropout import drop_into, named

dropout_add_fwd_kernel, dropout_add_bwd_kernel = named("dropout_add_fwd_kernel"), named("dropout_add_bwd_kernel")


def dropout_add_fwd(x: Tensor, residual: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    out, empty = torch.empty_like(residual), like(x)
    drop_into(dropout_add_fwd_kernel, out, None, x, residual, p, seed, empty)
    return out, empty


def dropout_add_bwd(grad_out: Tensor, like: Tensor, p: float, seed: Tensor, needs: list[bool]) -> tuple[Maybe, Maybe]:
    grad_x = torch.empty_like(like) if needs[0] else None
    grad_residual = torch.empty_like(grad_out) if needs[1] else None
    if grad_x is not None:
        drop_into(dropout_add_bwd_kernel, grad_x, grad_residual, grad_out, None, p, seed)
    elif grad_residual is not None:
        drop_into(dropout_add_bwd_kernel, grad_residual, None, grad_out, None, 0.0, seed)
    return grad_x, grad_residual


dropout_add = op.implement(dropout_add_fwd, dropout_add_bwd)

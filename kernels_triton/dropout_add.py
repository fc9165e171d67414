"""Dropout and a residual sum: the kernel of dropout, with the residual read, or its gradient written."""

import torch
from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference._dropout import Maybe
from kernels_reference.dropout_add import like, op

from ._dropout import SPACE, drop_into
from ._launch import configured


@configured(**SPACE)
def dropout_add_fwd_config(where: Gpu, M: int, N: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 2048, "num_warps": 4}


@configured(**SPACE)
def dropout_add_bwd_config(where: Gpu, M: int, N: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 2048, "num_warps": 4}


def dropout_add_fwd(x: Tensor, residual: Tensor, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    out, empty = torch.empty_like(residual), like(x)
    drop_into(dropout_add_fwd_config, out, None, x, residual, p, seed, empty)
    return out, empty


def dropout_add_bwd(grad_out: Tensor, like: Tensor, p: float, seed: Tensor, needs: list[bool]) -> tuple[Maybe, Maybe]:
    grad_x = torch.empty_like(like) if needs[0] else None
    grad_residual = torch.empty_like(grad_out) if needs[1] else None
    if grad_x is not None:
        drop_into(dropout_add_bwd_config, grad_x, grad_residual, grad_out, None, p, seed)
    elif grad_residual is not None:
        drop_into(dropout_add_bwd_config, grad_residual, None, grad_out, None, 0.0, seed)
    return grad_x, grad_residual


dropout_add = op.implement(dropout_add_fwd, dropout_add_bwd)

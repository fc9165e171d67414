"""A residual sum and its RMS norm: one pass over the sum, forward and backward."""

import torch
from torch import Tensor

from kernels_reference.add_rms_norm import Casting, Opt, op

from ._norm import add_norm_bwd, norm_bwd_config, norm_fwd, norm_fwd_config

CONFIGS = norm_fwd_config, norm_bwd_config


def add_rms_norm_fwd(
    x: Tensor, residual: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting
) -> tuple[Tensor, Tensor, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x, dtype=residual.dtype)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    _, rstd = norm_fwd(
        x, weight, None, eps, float(offset), out, centred=False, round_normed=casting == "llama", residual=residual, total=total
    )
    return out, total, rstd


def add_rms_norm_bwd(
    grad_out: Tensor, grad_total: Tensor, total: Tensor, weight: Opt, rstd: Tensor, offset: float, needs: list[bool]
) -> tuple[Opt, Opt, Opt]:
    inputs = grad_out, grad_total, total, weight, None, None, rstd, float(offset)
    return add_norm_bwd(*inputs, (*needs, False))[:3]


add_rms_norm = op.implement(add_rms_norm_fwd, add_rms_norm_bwd)

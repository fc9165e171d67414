"""A residual sum and its layer norm: one pass over the sum, forward and backward."""

import torch
from torch import Tensor

from kernels_reference.add_layer_norm import Opt, op

from ._norm import norm_bwd, norm_bwd_config, norm_fwd, norm_fwd_config

CONFIGS = norm_fwd_config, norm_bwd_config


def add_layer_norm_fwd(x: Tensor, residual: Tensor, weight: Opt, bias: Opt, eps: float) -> tuple[Tensor, Tensor, Opt, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x, dtype=residual.dtype)
    mean, rstd = norm_fwd(x, weight, bias, float(eps), None, out, centred=True, residual=residual, total=total)
    return out, total, mean, rstd


def add_layer_norm_bwd(
    grad_out: Tensor, grad_total: Tensor, total: Tensor, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Opt, Opt, Opt, Opt]:
    needs_x, needs_residual, *needs_rest = needs
    grad_x = torch.empty_like(grad_out) if needs_x else None
    grad_residual, grad_weight, grad_bias = norm_bwd(
        grad_out, grad_total, total, weight, bias, mean, rstd, None, (needs_x or needs_residual, *needs_rest), also=grad_x
    )
    return grad_x, grad_residual if needs_residual else None, grad_weight, grad_bias


add_layer_norm = op.implement(add_layer_norm_fwd, add_layer_norm_bwd)

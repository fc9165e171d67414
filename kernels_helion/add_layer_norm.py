"""A residual sum and its layer norm: one pass over the sum, forward and backward."""

import torch
from torch import Tensor

from kernels_reference.add_layer_norm import Opt, op

from ._norm import norm_bwd, norm_bwd_few_kernel, norm_bwd_kernel, norm_fwd, norm_fwd_kernel, norm_sum_kernel

KERNELS = norm_fwd_kernel, norm_bwd_kernel, norm_bwd_few_kernel, norm_sum_kernel


def add_layer_norm_fwd(x: Tensor, residual: Tensor, weight: Opt, bias: Opt, eps: float) -> tuple[Tensor, Tensor, Opt, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x, dtype=residual.dtype)
    mean, rstd = norm_fwd(x, weight, bias, float(eps), 0.0, out, centred=True, residual=residual, total=total)
    return out, total, mean, rstd


def add_layer_norm_bwd(
    grad_out: Tensor, grad_total: Tensor, total: Tensor, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Opt, Opt, Opt, Opt]:
    needs_x, needs_residual, *needs_rest = needs
    grad_x = torch.empty_like(grad_out) if needs_x else None
    grad_residual, grad_weight, grad_bias = norm_bwd(
        grad_out, grad_total, total, weight, bias, mean, rstd, 0.0, (needs_x or needs_residual, *needs_rest), also=grad_x
    )
    return grad_x, grad_residual if needs_residual else None, grad_weight, grad_bias


add_layer_norm = op.implement(add_layer_norm_fwd, add_layer_norm_bwd)

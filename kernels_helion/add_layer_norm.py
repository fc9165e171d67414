"""A residual sum and its layer norm: one pass over the sum, forward and backward."""

import torch
from torch import Tensor

from kernels_reference.add_layer_norm import Opt, op

from ._norm import add_norm_bwd, norm_bwd_few_kernel, norm_bwd_kernel, norm_fwd, norm_fwd_kernel, norm_sum_kernel

KERNELS = norm_fwd_kernel, norm_bwd_kernel, norm_bwd_few_kernel, norm_sum_kernel


def add_layer_norm_fwd(x: Tensor, residual: Tensor, weight: Opt, bias: Opt, eps: float) -> tuple[Tensor, Tensor, Opt, Tensor]:
    out, total = torch.empty_like(x), torch.empty_like(x, dtype=residual.dtype)
    mean, rstd = norm_fwd(x, weight, bias, float(eps), 0.0, out, centred=True, residual=residual, total=total)
    return out, total, mean, rstd


def add_layer_norm_bwd(
    grad_out: Tensor, grad_total: Tensor, total: Tensor, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Opt, Opt, Opt, Opt]:
    return add_norm_bwd(grad_out, grad_total, total, weight, bias, mean, rstd, 0.0, needs)


add_layer_norm = op.implement(add_layer_norm_fwd, add_layer_norm_bwd)

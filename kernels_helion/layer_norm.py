"""Layer norm: rows that are centred."""

import torch
from torch import Tensor

from kernels_reference.layer_norm import Opt, op

from ._norm import norm_bwd, norm_bwd_few_kernel, norm_bwd_kernel, norm_fwd, norm_fwd_kernel, norm_sum_kernel

KERNELS = norm_fwd_kernel, norm_bwd_kernel, norm_bwd_few_kernel, norm_sum_kernel


def layer_norm_fwd(x: Tensor, weight: Opt, bias: Opt, eps: float) -> tuple[Tensor, Opt, Tensor]:
    out = torch.empty_like(x)
    return out, *norm_fwd(x, weight, bias, float(eps), 0.0, out, centred=True)


def layer_norm_bwd(
    grad_out: Tensor, x: Tensor, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Opt, Opt, Opt]:
    return norm_bwd(grad_out, None, x, weight, bias, mean, rstd, 0.0, needs)


layer_norm = op.implement(layer_norm_fwd, layer_norm_bwd)

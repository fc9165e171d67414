"""Layer norm: rows that are centred."""

import torch
from torch import Tensor

from kernels_reference.layer_norm import Opt, op

from ._norm import norm_bwd, norm_bwd_config, norm_fwd, norm_fwd_config

CONFIGS = norm_fwd_config, norm_bwd_config


def layer_norm_fwd(x: Tensor, weight: Opt, bias: Opt, eps: float) -> tuple[Tensor, Opt, Tensor]:
    out = torch.empty_like(x)
    return out, *norm_fwd(x, weight, bias, float(eps), None, out, centred=True)


def layer_norm_bwd(
    grad_out: Tensor, x: Tensor, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Opt, Opt, Opt]:
    return norm_bwd(grad_out, None, x, weight, bias, mean, rstd, None, needs)


layer_norm = op.implement(layer_norm_fwd, layer_norm_bwd)

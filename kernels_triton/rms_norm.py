"""RMS norm: rows that are not centred."""

import torch
from torch import Tensor

from kernels_reference.rms_norm import Casting, Opt, empty_out, op

from ._norm import norm_bwd, norm_bwd_config, norm_fwd, norm_fwd_config

CONFIGS = norm_fwd_config, norm_bwd_config


def rms_norm_fwd(x: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> tuple[Tensor, Tensor]:
    out = empty_out(x, weight, eps, offset, casting)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    _, rstd = norm_fwd(x, weight, None, eps, float(offset), out, centred=False, round_normed=casting == "llama")
    return out, rstd


def rms_norm_bwd(grad_out: Tensor, x: Tensor, weight: Opt, rstd: Tensor, offset: float, needs: list[bool]) -> tuple[Opt, Opt]:
    grad_x, grad_weight, _ = norm_bwd(grad_out, None, x, weight, None, None, rstd, float(offset), (*needs, False))
    return grad_x, grad_weight


rms_norm = op.implement(rms_norm_fwd, rms_norm_bwd)

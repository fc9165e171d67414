"""A residual sum and its RMS norm: one pass over the sum, forward and backward."""

import torch
from torch import Tensor

from kernels_reference.add_rms_norm import Casting, Opt, op

from ._norm import norm_bwd, norm_bwd_config, norm_fwd, norm_fwd_config

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
    needs_x, needs_residual, needs_weight = needs
    grad_x = torch.empty_like(grad_out) if needs_x else None
    grad_residual, grad_weight, _ = norm_bwd(
        grad_out, grad_total, total, weight, None, None, rstd, float(offset), (needs_x or needs_residual, needs_weight, False),
        also=grad_x,
    )  # fmt: skip
    return grad_x, grad_residual if needs_residual else None, grad_weight


add_rms_norm = op.implement(add_rms_norm_fwd, add_rms_norm_bwd)

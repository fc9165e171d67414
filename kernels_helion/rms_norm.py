"""RMS norm: rows that are not centred."""

import torch
from torch import Tensor

from kernels_reference.rms_norm import Casting, Opt, empty_out, op

from ._norm import norm_bwd, norm_bwd_few_kernel, norm_bwd_kernel, norm_fwd, norm_fwd_kernel, norm_sum_kernel

KERNELS = norm_fwd_kernel, norm_bwd_kernel, norm_bwd_few_kernel, norm_sum_kernel


def rms_norm_fwd(x: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> tuple[Tensor, Tensor]:
    out = empty_out(x, weight, eps, offset, casting)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    normed_dtype = x.dtype if casting == "llama" else torch.float32
    _, rstd = norm_fwd(x, weight, None, eps, float(offset), out, centred=False, normed_dtype=normed_dtype)
    return out, rstd


def rms_norm_bwd(grad_out: Tensor, x: Tensor, weight: Opt, rstd: Tensor, offset: float, needs: list[bool]) -> tuple[Opt, Opt]:
    grad_x, grad_weight, _ = norm_bwd(grad_out, None, x, weight, None, None, rstd, float(offset), (*needs, False))
    return grad_x, grad_weight


rms_norm = op.implement(rms_norm_fwd, rms_norm_bwd)

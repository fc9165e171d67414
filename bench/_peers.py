"""Kernels of others under the ops' names and signatures, for the column of the optional extra `peers`.

What they lack raises NotImplementedError, and such a cell stays empty.
"""
# pyright: reportMissingImports=false

from typing import Any

import torch
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.group_norm import LigerGroupNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import Tensor

FORWARD_ONLY = {"cross_entropy": "its forward makes the gradient"}


def lacks(what: Any) -> None:
    if what:
        raise NotImplementedError("Liger has no such option")


def softmax(x: Tensor, dim: int = -1) -> Any:
    lacks(dim not in (-1, x.ndim - 1))
    return LigerSoftmaxFunction.apply(x)


def rms_norm(x: Tensor, weight: Any = None, eps: Any = None, *, offset: float = 0.0, casting: str = "none") -> Any:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, False)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Any = None, eps: Any = None, *, offset: float = 0.0, casting: str = "none"
) -> Any:
    lacks(weight is None or residual.dtype != x.dtype)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, casting, False)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    offset: float = 0.0, casting: str = "none", interleaved: bool = False,
) -> Any:  # fmt: skip
    """Two of its kernels and a third for both."""
    q, k = (rms_norm(x, w, eps, offset=offset, casting=casting).to(x.dtype) for x, w in ((q, q_weight), (k, k_weight)))
    return rope(q, k, cos, sin, interleaved=interleaved)


def swiglu(
    gate: Tensor, up: Any = None, *, interleaved: bool = False, alpha: float = 1.0, limit: Any = None, offset: float = 0.0
) -> Any:
    lacks(interleaved or limit is not None or (alpha, offset) != (1, 0))
    if up is None:
        gate, up = gate.chunk(2, -1)
    return LigerSiLUMulFunction.apply(gate, up)


def geglu(gate: Tensor, up: Any = None, *, interleaved: bool = False, approximate: str = "none") -> Any:
    lacks(interleaved or approximate != "tanh")
    if up is None:
        gate, up = gate.chunk(2, -1)
    return LigerGELUMulFunction.apply(gate, up)


def group_norm(x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    lacks(weight is None or bias is None)
    return LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], num_groups, eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Any:
    lacks(interleaved or cos.shape[-1] != q.shape[-1])
    # It turns what is (B, T, H, D) in memory in place, and copies everything else.
    q, k = (x.clone() if x.transpose(1, 2).is_contiguous() else x for x in (q, k))
    return LigerRopeFunction.apply(q, k, cos, sin)


def cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Any = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: Any = None, dtype: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    lacks(return_lse)
    flat = logits.reshape(-1, logits.shape[-1])
    # It overwrites the logits with their gradient.
    flat = flat.clone() if flat.requires_grad else flat
    options = weight, ignore_index, z_loss, label_smoothing, reduction, softcap
    loss, *_ = LigerCrossEntropyFunction.apply(flat, target.flatten(), *options)  # pyright: ignore
    loss = loss if reduction != "none" else loss.view(target.shape)
    return loss.to(dtype or logits.dtype)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Any = None, weight: Any = None,
    ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: Any = None,
    dtype: Any = None, return_lse: bool = False, extra_memory: float = 1.0,
) -> Any:  # fmt: skip
    lacks(return_lse or extra_memory == 0)
    options = linear_bias, weight, ignore_index, z_loss, label_smoothing, reduction, softcap
    flat = input.reshape(-1, input.shape[-1])
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(flat, linear_weight, target.flatten(), *options)  # pyright: ignore
    return loss.to(dtype or input.dtype)

"""Cross entropy: one pass over the logits forward, with a running maximum and sum, and one backward."""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference.cross_entropy import capped, op

from ._kernel import kernel, next_power_of_2

Maybe = Tensor | None


def fwd_config(logits: Tensor, *_: Any) -> dict[str, Any]:
    M, V = logits.shape
    block_v = min(next_power_of_2(V), 8192)
    return {"block_sizes": [max(1, min(4096 // block_v, next_power_of_2(M) // 512, 64)), block_v], "num_warps": 4}


def bwd_config(logits: Tensor, *_: Any) -> dict[str, Any]:
    M, V = logits.shape
    block_v = min(next_power_of_2(V), 4096)
    rows = max(1, min(4096 // block_v, next_power_of_2(M) // 512, 64))
    return {"block_sizes": [rows, block_v], "loop_orders": [[1, 0]], "num_warps": 4}


@kernel(fwd_config)
def cross_entropy_fwd_kernel(
    logits: Tensor, flat: Tensor, target: Tensor, weight: Maybe, weight_sum: Maybe, losses: Tensor, lse: Tensor, parts: Maybe,
    ignore_index: int, label_smoothing: float | None, z_loss: float | None, softcap: float | None, return_lse: bool | None,
) -> None:  # fmt: skip
    M, V = logits.size()
    for rows in hl.tile(M):
        t, counts, known, w = look_up(rows, target, weight, ignore_index, V)
        read = counts if return_lse is None else t == t
        at_target = capped(hl.load(flat, [rows.index * logits.stride(0) + t * logits.stride(1)], extra_mask=counts).float(), softcap)
        highest = hl.full([rows], float("-inf"), dtype=torch.float32)
        total = hl.zeros([rows], dtype=torch.float32)
        smooth = hl.zeros([rows], dtype=torch.float32)
        for cols in hl.tile(V):
            z = capped(hl.load(logits, [rows, cols], extra_mask=read[:, None]).float(), softcap)
            before = highest
            highest = torch.maximum(highest, torch.amax(z, dim=1))
            # An infinite maximum is not subtracted: inf - inf is NaN.
            shift = torch.where(torch.abs(highest) == float("inf"), 0.0, highest)
            total = total * torch.exp(before - shift) + torch.exp(z - shift[:, None]).sum(dim=1)
            if label_smoothing is not None:
                if weight is not None:
                    z = z * weight[cols].float()[None, :]
                smooth += z.sum(dim=1)
        shift = torch.where(torch.abs(highest) == float("inf"), 0.0, highest)
        log = torch.log(total)
        lse[rows] = log + shift
        loss = w * (log + (shift - at_target))
        if label_smoothing is not None:
            weights = V * 1.0 if weight_sum is None else weight_sum[0]
            loss = (1 - label_smoothing) * loss + label_smoothing / V * (weights * (log + shift) - smooth)
        loss = torch.where(counts, torch.where(known, loss, float("nan")), 0.0)
        regulariser = torch.zeros_like(loss)
        if z_loss is not None:
            regulariser = torch.where(counts, z_loss * (log + shift) * (log + shift), 0.0)
        if parts is None:
            losses[rows] = (loss + regulariser).to(losses.dtype)
        else:
            parts[0, rows] = loss
            parts[1, rows] = w
            parts[2, rows] = regulariser
            parts[3, rows] = counts.float()


def look_up(rows: Any, target: Tensor, weight: Maybe, ignore_index: int, V: int) -> Any:
    """Each row's target (0 where it is none), whether the row counts and the target is a class, and its weight."""
    t = target[rows].long()
    counts, known = t != ignore_index, (t >= 0) & (t < V)
    t = torch.where(known, t, 0)
    w = counts.float() if weight is None else hl.load(weight, [t], extra_mask=counts & known).float()
    return t, counts, known, w


def weight_sum(weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    return weight.sum(dtype=torch.float32)[None] if weight is not None and label_smoothing else None


def cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float,
    z_loss: float, softcap: float | None, dtype: torch.dtype | None, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, V = logits.shape
    out = logits.new_empty(M if reduction == "none" else (), dtype=dtype or logits.dtype)
    lse = logits.new_empty(M, dtype=torch.float32)
    total = logits.new_ones(2, dtype=torch.float32)
    parts = None if reduction == "none" else logits.new_empty(4, M, dtype=torch.float32)
    span = 1 + (M - 1) * logits.stride(0) + (V - 1) * logits.stride(1)
    cross_entropy_fwd_kernel(
        logits, logits.as_strided((span,), (1,)), target, weight, weight_sum(weight, label_smoothing),
        out if parts is None else parts, lse, parts, ignore_index, label_smoothing or None, z_loss or None, softcap, return_lse or None,
    )  # fmt: skip
    if parts is not None:
        loss, weights, regulariser, counts = parts.sum(1)
        if reduction == "mean":
            total = torch.stack([weights, counts])
        out = (loss / total[0] + regulariser / total[1]).to(out.dtype)
    return out, lse, total


@kernel(bwd_config)
def cross_entropy_bwd_kernel(
    logits: Tensor, grad_logits: Tensor, grad_out: Tensor, grad_lse: Maybe, target: Tensor, weight: Maybe, weight_sum: Maybe,
    lse: Tensor, total: Tensor, ignore_index: int, label_smoothing: float | None, z_loss: float | None, softcap: float | None,
) -> None:  # fmt: skip
    M, V = logits.size()
    for rows, cols in hl.tile([M, V]):
        t, counts, known, w = look_up(rows, target, weight, ignore_index, V)
        read = counts if grad_lse is None else t == t
        z = capped(hl.load(logits, [rows, cols], extra_mask=read[:, None]).float(), softcap)
        row_lse = lse[rows]
        grad = grad_out[rows].float()
        per_weight = torch.where(counts & known, grad / total[0], 0.0)
        on_target = per_weight * w
        on_softmax = on_target
        each = per_weight
        if label_smoothing is not None:
            each = label_smoothing / V * per_weight
            on_target = on_target * (1 - label_smoothing)
            on_softmax = on_target + each * (V * 1.0 if weight_sum is None else weight_sum[0])
        if z_loss is not None:
            on_softmax = on_softmax + torch.where(counts, 2 * z_loss * row_lse * grad / total[1], 0.0)
        on_softmax = torch.where(counts & ~known, float("nan"), on_softmax)
        if grad_lse is not None:
            on_softmax = on_softmax + grad_lse[rows].float()
        g = torch.exp(z - row_lse[:, None]) * on_softmax[:, None]
        g = g - torch.where(cols.index[None, :] == t[:, None], on_target[:, None], 0.0)
        if label_smoothing is not None:
            if weight is None:
                g = g - each[:, None]
            else:
                g = g - each[:, None] * weight[cols].float()[None, :]
        if softcap is not None:
            g = g * (1 - (z / softcap) * (z / softcap))
        grad_logits[rows, cols] = torch.where(read[:, None], g, 0.0).to(grad_logits.dtype)


def cross_entropy_bwd(
    grad_out: Tensor, grad_lse: Maybe, logits: Tensor, target: Tensor, weight: Maybe, lse: Tensor, total: Tensor,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
) -> tuple[Tensor]:  # fmt: skip
    grad_logits = torch.empty_like(logits)
    cross_entropy_bwd_kernel(
        logits, grad_logits, grad_out.expand(logits.size(0)), grad_lse, target, weight, weight_sum(weight, label_smoothing),
        lse, total, ignore_index, label_smoothing or None, z_loss or None, softcap,
    )  # fmt: skip
    return (grad_logits,)


cross_entropy = op.implement(cross_entropy_fwd, cross_entropy_bwd)

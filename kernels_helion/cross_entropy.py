"""Cross entropy: one pass over the logits forward, with a running maximum and sum in each lane, and one backward."""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference.cross_entropy import capped, op

from ._kernel import kernel
from ._online import finite, online_step, scaled, tile

Maybe = Tensor | None
Number = float | None


def look_up(rows: Any, target: Tensor, weight: Maybe, ignore_index: int, V: int) -> Any:
    """Each row's target, whether the row counts, and its weight; where the target is no class 0 and NaN."""
    t = hl.load(target, [rows]).long()
    counts, known = t != ignore_index, (t >= 0) & (t < V)
    t = torch.where(known, t, 0)
    w = counts.float() if weight is None else hl.load(weight, [t], extra_mask=counts).float()
    return t, counts, torch.where(counts, torch.where(known, w, float("nan")), 0.0)


def all_of(weight_sum: Maybe, V: int) -> Any:
    return V * 1.0 if weight_sum is None else hl.load(weight_sum, [0])


@kernel(lambda logits, *rest: {**tile(logits, 4 * rest[-1]), "block_sizes": tile(logits, 4 * rest[-1])["block_sizes"][:1]})
def cross_entropy_fwd_kernel(
    logits: Tensor, flat: Tensor, stride_m: int, stride_v: int, target: Tensor, weight: Maybe, weight_sum: Maybe, lse: Tensor,
    out: Tensor, total: Tensor, parts: Maybe, ignore_index: int, label_smoothing: Number, z_loss: Number, softcap: Number,
    every_lse: bool | None, lanes: int,
) -> None:  # fmt: skip
    M, V = logits.size()
    lanes = hl.specialize(lanes)
    for rows in hl.tile(M):
        t, counts, w = look_up(rows, target, weight, ignore_index, V)
        read = counts if every_lse is None else t == t
        highest = hl.full([rows, lanes], float("-inf"), dtype=torch.float32)
        sums = hl.zeros([rows, lanes], dtype=torch.float32)
        smooth = hl.zeros([rows, lanes], dtype=torch.float32)
        for cols in hl.tile(V, block_size=4 * lanes):
            z = capped(hl.load(logits, [rows, cols], extra_mask=read[:, None]).float(), softcap)
            steps_of = torch.where((cols.index < V)[None, :], z, float("-inf")).view(rows.block_size, 4, lanes)
            highest, sums = online_step(highest, sums, steps_of)
            if label_smoothing is not None:
                if weight is not None:
                    z = z * weight[cols].float()[None, :]
                smooth = smooth + z.view(rows.block_size, 4, lanes).sum(dim=1)
        shift = finite(torch.amax(highest, dim=1))
        log = torch.log2((sums * torch.exp2(highest - shift[:, None])).sum(dim=1))
        row_lse = (log + shift) / scaled(1.0)
        at_target = capped(hl.load(flat, [rows.index * stride_m + t * stride_v], extra_mask=counts).float(), softcap)
        # In this order a large maximum cancels before the small logarithm is added.
        loss = w * (log + (shift - scaled(at_target))) / scaled(1.0)
        if label_smoothing is not None:
            loss = loss + label_smoothing * ((all_of(weight_sum, V) * row_lse - smooth.sum(dim=1)) / V - loss)
        loss = torch.where(counts, loss, 0.0)
        z_part = torch.zeros_like(loss)
        if z_loss is not None:
            z_part = torch.where(counts, z_loss * row_lse * row_lse, 0.0)
        lse[rows] = row_lse
        if parts is None:
            out[rows] = (loss + z_part).to(out.dtype)
            total[0] = 1.0
            total[1] = 1.0
        else:
            parts[0, rows] = w
            parts[1, rows] = counts.float()
            parts[2, rows] = loss
            parts[3, rows] = z_part


@kernel(lambda parts, *_: {"block_sizes": [], "reduction_loops": [4096 if parts.size(1) > 4096 else None], "num_warps": 16})
def cross_entropy_reduce_kernel(parts: Tensor, out: Tensor, total: Tensor, mean: bool | None) -> None:
    """From sums of weight, count, loss and z-loss, what losses and z-losses are divided by, and the result."""
    for _ in hl.grid(1):
        weight, count = parts[0, :].sum(), parts[1, :].sum()
        loss, z_part = parts[2, :].sum(), parts[3, :].sum()
        if mean is None:
            total[0] = 1.0
            total[1] = 1.0
            out[0] = (loss + z_part).to(out.dtype)
        else:
            total[0] = weight
            total[1] = count
            out[0] = (loss / weight + z_part / count).to(out.dtype)


@kernel(lambda logits, *_: {**tile(logits, 4096), "loop_orders": [[1, 0]]})
def cross_entropy_bwd_kernel(
    logits: Tensor, grad_logits: Tensor, grad_out: Tensor, grad_lse: Maybe, target: Tensor, weight: Maybe, weight_sum: Maybe,
    lse: Tensor, total: Tensor, first: int, classes: int, ignore_index: int, label_smoothing: Number, z_loss: Number,
    softcap: Number,
) -> None:  # fmt: skip
    M, V = logits.size()
    for rows, cols in hl.tile([M, V]):
        t, counts, w = look_up(rows, target, weight, ignore_index, classes)
        read = counts if grad_lse is None else t == t
        z = capped(hl.load(logits, [rows, cols], extra_mask=read[:, None]).float(), softcap)
        row_lse, grad = lse[rows], grad_out[rows].float()
        # The gradient is softmax * on_softmax - one_hot(target) * on_target - each * weight.
        each = torch.where(counts, grad / total[0], 0.0)
        on_target = each * w
        on_softmax = on_target
        if label_smoothing is not None:
            each = each * (label_smoothing / classes)
            on_target = on_target * (1 - label_smoothing)
            on_softmax = on_target + each * all_of(weight_sum, classes)
        if z_loss is not None:
            on_softmax = on_softmax + torch.where(counts, 2 * z_loss * row_lse * grad / total[1], 0.0)
        if grad_lse is not None:
            on_softmax = on_softmax + grad_lse[rows].float()
        g = torch.exp(z - row_lse[:, None]) * on_softmax[:, None]
        g = g - torch.where(cols.index[None, :] == (t - first)[:, None], on_target[:, None], 0.0)
        if label_smoothing is not None:
            if weight is not None:  # noqa: SIM108 (Helion evaluates both arms of an expression)
                g = g - each[:, None] * weight[cols].float()[None, :]
            else:
                g = g - each[:, None]
        if softcap is not None:
            g = g * (1 - (z / softcap) * (z / softcap))
        grad_logits[rows, cols] = torch.where(read[:, None], g, 0.0).to(grad_logits.dtype)


def cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Maybe, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float,
    softcap: Number, dtype: torch.dtype | None, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (M, V), alone = logits.shape, reduction == "none"
    lse, total = logits.new_empty(M, dtype=torch.float32), logits.new_empty(2, dtype=torch.float32)
    out = logits.new_empty(M if alone else 1, dtype=dtype or logits.dtype)
    # Two at least: Triton 3.6 does not compile what Helion makes of a store to a size of 1.
    parts = None if alone else lse.new_empty(4, max(M, 2))
    # A kernel gathers one element a row only from a flat tensor.
    stride_m, stride_v = logits.stride()
    flat = logits.as_strided((1 + (M - 1) * stride_m + (V - 1) * stride_v,), (1,))
    # Few rows take wide programs.
    width = tile(logits, 4096 if M > 256 else 16384)["block_sizes"][1]
    cross_entropy_fwd_kernel(
        logits, flat, stride_m, stride_v, target, weight, weight_sum(weight, label_smoothing), lse, out, total, parts,
        ignore_index, label_smoothing or None, z_loss or None, softcap, return_lse or None, width // 4,
    )  # fmt: skip
    if parts is None:
        return out, lse, total
    cross_entropy_reduce_kernel(parts.narrow(1, 0, M), out, total, reduction == "mean" or None)
    return out.view(()), lse, total


def weight_sum(weight: Maybe, label_smoothing: float) -> Maybe:
    return None if weight is None or not label_smoothing else weight.sum(0, keepdim=True, dtype=torch.float32)


def write_grad(
    grad_out: Tensor, grad_lse: Maybe, logits: Tensor, target: Tensor, weight: Maybe, lse: Tensor, total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: Number, first: int, classes: int, grad_logits: Tensor,
) -> None:  # fmt: skip
    """The gradient of logits, which are those of classes from `first` on; it may take their place."""
    cross_entropy_bwd_kernel(
        logits, grad_logits, grad_out.expand(logits.size(0)), grad_lse, target, weight, weight_sum(weight, label_smoothing),
        lse, total, first, classes, ignore_index, label_smoothing or None, z_loss or None, softcap,
    )  # fmt: skip


def cross_entropy_bwd(
    grad_out: Tensor, grad_lse: Maybe, logits: Tensor, target: Tensor, weight: Maybe, lse: Tensor, total: Tensor,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: Number,
) -> tuple[Tensor]:  # fmt: skip
    grad_logits = torch.empty_like(logits)
    options = ignore_index, label_smoothing, z_loss, softcap
    write_grad(grad_out, grad_lse, logits, target, weight, lse, total, *options, 0, logits.size(1), grad_logits)
    return (grad_logits,)


cross_entropy = op.implement(cross_entropy_fwd, cross_entropy_bwd)

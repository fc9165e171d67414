"""Cross entropy: one pass over the logits forward, with a running maximum and sum in each lane, and one backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels_reference.cross_entropy import op

from ._launch import launch, next_power_of_2


@triton.jit
def load(ptr, mask, other, softcap):
    """Logits after the soft cap."""
    x = tl.load(ptr, mask, other=other).to(tl.float32)
    return x if softcap is None else softcap * libdevice.tanh(x / softcap)


@triton.jit
def look_up(rows, M, target_ptr, target_stride, weight_ptr, weight_stride, V, ignore_index):
    """Each row's target (0 where it is not one of V classes), its weight, and whether the row counts and the target is one."""
    target = tl.load(target_ptr + rows * target_stride, rows < M, other=0).to(tl.int64)
    counts = (rows < M) & (target != ignore_index)
    known = (target >= 0) & (target < V)
    target = tl.where(known, target, 0)
    weight = counts.to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + target * weight_stride, counts & known, other=0.0).to(tl.float32)
    return target, weight, counts, known


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr,  # (M, V)
    target_ptr,  # (M,)
    weight_ptr,  # (V,), or None
    weight_sum_ptr,  # one element; None without weights or smoothing
    out_ptr,  # (M,), or None where the rows are reduced
    lse_ptr,  # (M,)
    parts_ptr,  # (4, programs), or None: sums of losses, weights, z-losses and counts
    total_ptr,  # (2,)
    M,
    V,
    logits_stride_m,
    logits_stride_v,
    target_stride,
    weight_stride,
    ignore_index,
    label_smoothing,  # None for 0
    z_loss,  # None for 0
    softcap,
    ALL: tl.constexpr,  # lse of ignored rows, too
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    target, weight, counts, known = look_up(rows, M, target_ptr, target_stride, weight_ptr, weight_stride, V, ignore_index)
    read = (rows < M) if ALL else counts
    logits_ptr += rows * logits_stride_m
    at_target = load(logits_ptr + target * logits_stride_v, counts, 0.0, softcap)
    # A tile is BLOCK_K steps of BLOCK_V lanes. Lanes keep their own maximum and sum, so that no step waits for all warps.
    lanes = tl.arange(0, BLOCK_K)[None, :, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, None, :]
    highest = tl.full((BLOCK_M, BLOCK_V), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    smooth = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(0, tl.where(tl.max(read.to(tl.int32), 0) > 0, V, 0), BLOCK_K * BLOCK_V):
        cols = start + lanes
        mask = read[:, None, None] & (cols < V)
        z = load(logits_ptr[:, None, None] + cols.to(tl.int64) * logits_stride_v, mask, float("-inf"), softcap)
        if softcap is not None:
            z = tl.where(mask, z, float("-inf"))
        before = highest
        highest = tl.maximum(highest, tl.max(z, 1))
        # An infinite maximum is not subtracted: inf - inf is NaN.
        shift = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
        total = total * tl.exp(before - shift) + tl.sum(tl.exp(z - shift[:, None, :]), 1)
        if label_smoothing is not None:
            if weight_ptr is not None:
                z *= tl.load(weight_ptr + cols.to(tl.int64) * weight_stride, cols < V, other=0.0).to(tl.float32)
            smooth += tl.sum(tl.where(mask, z, 0.0), 1)
    shift = tl.max(highest, 1)
    shift = tl.where(tl.abs(shift) == float("inf"), 0.0, shift)
    log = tl.log(tl.sum(total * tl.exp(highest - shift[:, None]), 1))
    lse = log + shift
    tl.store(lse_ptr + rows, lse, rows < M)
    # In this order a large maximum cancels before the small logarithm is added.
    loss = weight * (log + (shift - at_target))
    if label_smoothing is not None:
        weight_sum = V * 1.0 if weight_ptr is None else tl.load(weight_sum_ptr)
        loss = (1 - label_smoothing) * loss + label_smoothing / V * (weight_sum * lse - tl.sum(smooth, 1))
    loss = tl.where(counts, tl.where(known, loss, float("nan")), 0.0)
    regulariser = tl.zeros_like(loss) if z_loss is None else tl.where(counts, z_loss * lse * lse, 0.0)
    if out_ptr is None:
        parts_ptr += tl.program_id(0)
        programs = tl.num_programs(0).to(tl.int64)
        tl.store(parts_ptr, tl.sum(loss, 0))
        tl.store(parts_ptr + programs, tl.sum(weight, 0))
        tl.store(parts_ptr + 2 * programs, tl.sum(regulariser, 0))
        tl.store(parts_ptr + 3 * programs, tl.sum(counts.to(tl.float32), 0))
    else:
        tl.store(out_ptr + rows, loss + regulariser, rows < M)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + tl.arange(0, 2), tl.full((2,), 1.0, tl.float32))


@triton.jit
def cross_entropy_sum_kernel(
    parts_ptr,  # (4, P)
    out_ptr,  # one element
    total_ptr,  # (2,)
    P,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.arange(0, 4)
    sums = tl.zeros((4, BLOCK), tl.float32)
    for start in range(0, P, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        sums += tl.load(parts_ptr + part[:, None].to(tl.int64) * P + cols, cols < P, other=0.0)
    sums = tl.sum(sums, 1)
    # Losses over weights, z-losses over counts.
    over = tl.sum(tl.where(part[None, :] == part[:, None] + 1, sums[None, :], 0.0), 1) if MEAN else sums * 0 + 1
    tl.store(out_ptr, tl.sum(tl.where(part % 2 == 0, sums / over, 0.0), 0))
    tl.store(total_ptr + part // 2, over, part % 2 == 0)


@triton.jit
def cross_entropy_bwd_kernel(
    grad_out_ptr,  # (M,) or one element
    grad_lse_ptr,  # (M,), or None
    logits_ptr,  # (M, V)
    target_ptr,  # (M,)
    weight_ptr,  # (V,), or None
    weight_sum_ptr,  # one element; None without weights or smoothing
    lse_ptr,  # (M,)
    total_ptr,  # (2,)
    grad_logits_ptr,  # (M, V)
    M,
    V,
    grad_out_stride,
    grad_lse_stride,
    logits_stride_m,
    logits_stride_v,
    target_stride,
    weight_stride,
    grad_logits_stride_m,
    grad_logits_stride_v,
    ignore_index,
    label_smoothing,  # None for 0
    z_loss,  # None for 0
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    blocks = tl.cdiv(V, BLOCK_V)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    target, weight, counts, known = look_up(rows, M, target_ptr, target_stride, weight_ptr, weight_stride, V, ignore_index)
    read = counts if grad_lse_ptr is None else rows < M
    z = load(logits_ptr + rows[:, None] * logits_stride_m + cols * logits_stride_v, read[:, None] & (cols < V), 0.0, softcap)
    lse = tl.load(lse_ptr + rows, read, other=0.0)
    grad_out = tl.load(grad_out_ptr + rows * grad_out_stride, counts, other=0.0).to(tl.float32)
    # The gradient is softmax * on_softmax - one_hot(target) * on_target - each * weight.
    per_weight = tl.where(counts & known, grad_out / tl.load(total_ptr), 0.0)
    on_target = per_weight * weight
    on_softmax = on_target
    if label_smoothing is not None:
        each = label_smoothing / V * per_weight
        on_target *= 1 - label_smoothing
        on_softmax = on_target + each * (V if weight_ptr is None else tl.load(weight_sum_ptr))
    if z_loss is not None:
        on_softmax += tl.where(counts, 2 * z_loss * lse * grad_out / tl.load(total_ptr + 1), 0.0)
    on_softmax = tl.where(counts & (known == 0), float("nan"), on_softmax)
    if grad_lse_ptr is not None:
        on_softmax += tl.load(grad_lse_ptr + rows * grad_lse_stride, read, other=0.0).to(tl.float32)
    grad = tl.exp(z - lse[:, None]) * on_softmax[:, None] - tl.where(cols == target[:, None], on_target[:, None], 0.0)
    if label_smoothing is not None:
        if weight_ptr is None:
            grad -= each[:, None]
        else:
            grad -= each[:, None] * tl.load(weight_ptr + cols * weight_stride, cols < V, other=0.0).to(tl.float32)
    if softcap is not None:
        grad *= 1 - (z / softcap) * (z / softcap)
    grad_logits_ptr += rows[:, None] * grad_logits_stride_m + cols * grad_logits_stride_v
    tl.store(grad_logits_ptr, tl.where(read[:, None], grad, 0.0), (rows[:, None] < M) & (cols < V))


def blocks(M: int, V: int) -> tuple[int, int]:
    """Rows and columns of a tile of at most 4096 elements; short rows share one where there are enough to fill a GPU."""
    block_v = min(next_power_of_2(V), 4096)
    return max(1, min(4096 // block_v, next_power_of_2(M) // 512, 64)), block_v


def weight_sum(weight: Tensor | None, label_smoothing: float) -> Tensor | None:
    return weight.sum(dtype=torch.float32) if weight is not None and label_smoothing else None


def cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float,
    z_loss: float, softcap: float | None, dtype: torch.dtype | None, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (M, V), rowwise = logits.shape, reduction == "none"
    out = logits.new_empty(M if rowwise else (), dtype=dtype or logits.dtype)
    lse = logits.new_empty(M, dtype=torch.float32)
    total = logits.new_empty(2, dtype=torch.float32)
    block_m, block_v = blocks(M, V)
    programs = triton.cdiv(M, block_m)
    parts = None if rowwise else logits.new_empty(4, programs, dtype=torch.float32)
    lanes = min(block_v, 1024)
    launch(
        cross_entropy_fwd_kernel, (programs,), logits, target, weight, weight_sum(weight, label_smoothing),
        out if rowwise else None, lse, parts, total, M, V, *logits.stride(), target.stride(0),
        0 if weight is None else weight.stride(0), ignore_index, label_smoothing or None, z_loss or None, softcap,
        return_lse, block_m, block_v // lanes, lanes, num_warps=4,
    )  # fmt: skip
    if not rowwise:
        launch(cross_entropy_sum_kernel, (1,), parts, out, total, programs, reduction == "mean", 1024, num_warps=8)
    return out, lse, total


def cross_entropy_bwd(
    grad_out: Tensor, grad_lse: Tensor | None, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, total: Tensor,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
) -> tuple[Tensor]:  # fmt: skip
    grad_logits = torch.empty_like(logits)
    M, V = logits.shape
    block_m, block_v = blocks(M, V)
    launch(
        cross_entropy_bwd_kernel, (triton.cdiv(M, block_m) * triton.cdiv(V, block_v),), grad_out, grad_lse, logits, target,
        weight, weight_sum(weight, label_smoothing), lse, total, grad_logits, M, V, grad_out.stride(0) if grad_out.ndim else 0,
        0 if grad_lse is None else grad_lse.stride(0), *logits.stride(), target.stride(0),
        0 if weight is None else weight.stride(0), *grad_logits.stride(), ignore_index, label_smoothing or None, z_loss or None,
        softcap, block_m, block_v, num_warps=4,
    )  # fmt: skip
    return (grad_logits,)


cross_entropy = op.implement(cross_entropy_fwd, cross_entropy_bwd)

"""Cross entropy: one pass over the logits forward, with a running maximum and sum in each lane, and one backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels_reference.cross_entropy import op

from ._launch import launch, next_power_of_2

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def read_logits(ptr, mask, softcap):
    x = tl.load(ptr, mask, other=0.0).to(tl.float32)
    return x if softcap is None else softcap * libdevice.tanh(x / softcap)


@triton.jit
def look_up(rows, M, V, target_ptr, target_stride, weight_ptr, weight_stride, ignore_index):
    """Each row's target, whether the row counts, and its weight; where the target is no class 0 and NaN."""
    target = tl.load(target_ptr + rows * target_stride, rows < M, other=0).to(tl.int64)
    counts = (rows < M) & (target != ignore_index)
    known = (target >= 0) & (target < V)
    target = tl.where(known, target, 0)
    weight = counts.to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + target * weight_stride, counts, other=0.0).to(tl.float32)
    return target, counts, tl.where(counts & (known == 0), float("nan"), weight)


@triton.jit
def finite(highest):
    """What to subtract: not an infinite maximum, since inf - inf is NaN."""
    return tl.where(tl.abs(highest) == float("inf"), 0.0, highest)


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr, logits_stride_m, logits_stride_v,  # (M, V)
    target_ptr, target_stride,  # (M,)
    weight_ptr, weight_stride, weight_sum_ptr,  # (V,) and one element, or None
    out_ptr,  # (M,), or None
    lse_ptr,  # (M,)
    parts_ptr,  # (4, programs): losses, weights, z-losses and counts; or None
    total_ptr,  # (2,)
    M, V, ignore_index, label_smoothing, z_loss, softcap,  # the last three None where there is none
    EVERY_LSE: tl.constexpr, BLOCK_M: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    target, counts, weight = look_up(rows, M, V, target_ptr, target_stride, weight_ptr, weight_stride, ignore_index)
    read = rows < M if EVERY_LSE else counts
    logits_ptr += rows * logits_stride_m
    at_target = read_logits(logits_ptr + target * logits_stride_v, counts, softcap)
    # Each lane keeps its own maximum, in units of log(2), and sum over its STEPS of a tile: no step waits for other warps.
    highest = tl.full((BLOCK_M, LANES), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, LANES), tl.float32)
    smooth = tl.zeros((BLOCK_M, LANES), tl.float32)
    for start in range(0, tl.where(tl.max(read.to(tl.int32), 0) > 0, V, 0), STEPS * LANES):
        cols = start + tl.arange(0, STEPS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
        mask = read[:, None, None] & (cols < V)
        z = read_logits(logits_ptr[:, None, None] + cols.to(tl.int64) * logits_stride_v, mask, softcap)
        if label_smoothing is not None:
            if weight_ptr is None:
                smooth += tl.sum(z, 1)
            else:
                smooth += tl.sum(z * tl.load(weight_ptr + cols.to(tl.int64) * weight_stride, cols < V, other=0.0), 1)
        z = tl.where(mask, z, float("-inf"))
        before = highest
        highest = tl.maximum(highest, tl.max(z, 1) * LOG2E)
        shift = finite(highest)
        e = tl.exp2(tl.fma(z, LOG2E, -shift[:, None, :]))
        total = total * tl.exp2(before - shift) + tl.sum(e, 1)
    shift = finite(tl.max(highest, 1))
    log = tl.log2(tl.sum(total * tl.exp2(highest - shift[:, None]), 1))
    lse = (log + shift) / LOG2E
    # In this order, and with the same rounding as above, a large maximum cancels before the small logarithm is added.
    loss = weight * (log - tl.fma(at_target, LOG2E, -shift)) / LOG2E
    if label_smoothing is not None:
        weight_sum = V * 1.0 if weight_ptr is None else tl.load(weight_sum_ptr)
        loss += label_smoothing * ((weight_sum * lse - tl.sum(smooth, 1)) / V - loss)
    loss = tl.where(counts, loss, 0.0)
    regulariser = tl.zeros_like(loss) if z_loss is None else tl.where(counts, z_loss * lse * lse, 0.0)
    tl.store(lse_ptr + rows, lse, rows < M)
    if parts_ptr is not None:
        parts_ptr += tl.program_id(0)
        P = tl.num_programs(0).to(tl.int64)
        tl.store(parts_ptr, tl.sum(loss, 0))
        tl.store(parts_ptr + P, tl.sum(weight, 0))
        tl.store(parts_ptr + 2 * P, tl.sum(regulariser, 0))
        tl.store(parts_ptr + 3 * P, tl.sum(counts.to(tl.float32), 0))
    else:
        tl.store(out_ptr + rows, loss + regulariser, rows < M)
        tl.store(total_ptr + tl.arange(0, 2), tl.full((2,), 1.0, tl.float32))


@triton.jit
def sum_part(part_ptr, P, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, P, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, i < P, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def cross_entropy_sum_kernel(
    parts_ptr,  # (4, P)
    out_ptr,  # one element
    total_ptr,  # (2,)
    P, MEAN: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    P = tl.cast(P, tl.int64)
    loss, weight, count = sum_part(parts_ptr, P, BLOCK), 1.0, 1.0
    if MEAN:
        weight, count = sum_part(parts_ptr + P, P, BLOCK), sum_part(parts_ptr + 3 * P, P, BLOCK)
    out = loss / weight
    if Z_LOSS:
        out += sum_part(parts_ptr + 2 * P, P, BLOCK) / count
    tl.store(out_ptr, out)
    tl.store(total_ptr, weight)
    tl.store(total_ptr + 1, count)


@triton.jit
def cross_entropy_bwd_kernel(
    grad_out_ptr, grad_out_stride,  # (M,), or one element
    grad_lse_ptr, grad_lse_stride,  # (M,), or None
    logits_ptr, logits_stride_m, logits_stride_v,  # (M, V)
    target_ptr, target_stride,  # (M,)
    weight_ptr, weight_stride, weight_sum_ptr,  # (V,) and one element, or None
    lse_ptr,  # (M,)
    total_ptr,  # (2,)
    grad_logits_ptr, grad_logits_stride_m, grad_logits_stride_v,  # (M, V)
    M, V, ignore_index, label_smoothing, z_loss, softcap,  # the last three None where there is none
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK_V)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    target, counts, weight = look_up(rows, M, V, target_ptr, target_stride, weight_ptr, weight_stride, ignore_index)
    read = counts if grad_lse_ptr is None else rows < M
    logits_ptr += rows[:, None] * logits_stride_m
    z = read_logits(logits_ptr + cols * logits_stride_v, read[:, None] & (cols < V), softcap)
    lse = tl.load(lse_ptr + rows, read, other=0.0)
    grad_out = tl.load(grad_out_ptr + rows * grad_out_stride, counts, other=0.0).to(tl.float32)
    # The gradient is softmax * on_softmax - one_hot(target) * on_target - each * weight.
    each = tl.where(counts, grad_out / tl.load(total_ptr), 0.0)
    on_target = each * weight
    on_softmax = on_target
    if label_smoothing is not None:
        each *= label_smoothing / V
        on_target *= 1 - label_smoothing
        on_softmax = on_target + each * (V if weight_ptr is None else tl.load(weight_sum_ptr))
    if z_loss is not None:
        on_softmax += tl.where(counts, 2 * z_loss * lse * grad_out / tl.load(total_ptr + 1), 0.0)
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
    grad_logits_ptr += rows[:, None] * grad_logits_stride_m
    tl.store(
        grad_logits_ptr + cols * grad_logits_stride_v, tl.where(read[:, None], grad, 0.0), (rows[:, None] < M) & (cols < V)
    )


def blocks(M: int, V: int, most: int) -> tuple[int, int]:
    """Rows and columns of a tile; short rows share one where there are enough to fill a GPU."""
    width = min(next_power_of_2(V), most)
    return max(1, min(4096 // width, next_power_of_2(M) // 512, 64)), width


def options(
    weight: Tensor | None, label_smoothing: float, z_loss: float
) -> tuple[tuple[Tensor | None, int, Tensor | None], float | None, float | None]:
    """The weight and its sum, and None where there is none: Triton compiles what is None out."""
    if weight is None:
        return (None, 0, None), label_smoothing or None, z_loss or None
    weight_sum = weight.sum(dtype=torch.float32) if label_smoothing else None
    return (weight, weight.stride(0), weight_sum), label_smoothing or None, z_loss or None


def cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float,
    z_loss: float, softcap: float | None, dtype: torch.dtype | None, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, V = logits.shape
    out = logits.new_empty(M if reduction == "none" else (), dtype=dtype or logits.dtype)
    lse, total = logits.new_empty(M, dtype=torch.float32), logits.new_empty(2, dtype=torch.float32)
    # One row to a program; where there are few, wide programs.
    few = M <= 256
    block_m, width = blocks(M, V, 32768 if few else 8192)
    lanes = min(width, 4096 if few else 1024)
    programs = triton.cdiv(M, block_m)
    parts = None if reduction == "none" else logits.new_empty(4, programs, dtype=torch.float32)
    weights, smoothing, z = options(weight, label_smoothing, z_loss)
    launch(
        cross_entropy_fwd_kernel, (programs,), logits, *logits.stride(), target, target.stride(0), *weights,
        None if parts is not None else out, lse, parts, total, M, V, ignore_index, smoothing, z, softcap,
        return_lse, block_m, width // lanes, lanes, num_warps=max(lanes // 256, 4),
    )  # fmt: skip
    if parts is not None:
        launch(
            cross_entropy_sum_kernel, (1,), parts, out, total, programs, reduction == "mean", z is not None, 4096, num_warps=8
        )
    return out, lse, total


def cross_entropy_bwd(
    grad_out: Tensor, grad_lse: Tensor | None, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor,
    total: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
) -> tuple[Tensor]:  # fmt: skip
    M, V = logits.shape
    grad_logits = torch.empty_like(logits)
    block_m, block_v = blocks(M, V, 4096)
    weights, smoothing, z = options(weight, label_smoothing, z_loss)
    launch(
        cross_entropy_bwd_kernel, (triton.cdiv(M, block_m) * triton.cdiv(V, block_v),),
        grad_out, grad_out.stride(0) if grad_out.ndim else 0, grad_lse, 0 if grad_lse is None else grad_lse.stride(0),
        logits, *logits.stride(), target, target.stride(0), *weights, lse, total, grad_logits, *grad_logits.stride(),
        M, V, ignore_index, smoothing, z, softcap, block_m, block_v,
    )  # fmt: skip
    return (grad_logits,)


cross_entropy = op.implement(cross_entropy_fwd, cross_entropy_bwd)

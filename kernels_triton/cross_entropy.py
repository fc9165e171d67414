"""Cross entropy: one pass over the logits forward, with a running maximum and sum in each lane, and one backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels_reference._config import Gpu
from kernels_reference.cross_entropy import op

from ._launch import configured, launch
from ._online import LOG2E, blocks, finite, online_step


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
    weight = 1.0
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + target * weight_stride, counts, other=0.0).to(tl.float32)
    return target, counts, tl.where(counts, tl.where(known, weight, float("nan")), 0.0)


@triton.jit
def cross_entropy_fwd_kernel(
    logits_ptr, logits_stride_m, logits_stride_v,  # (M, V)
    target_ptr, target_stride,  # (M,)
    weight_ptr, weight_stride, weight_sum_ptr,  # (V,) and one element, or None
    lse_ptr, out_ptr, total_ptr,  # (M,), (M,), (2,)
    parts_ptr,  # (4, programs), sums of weight, count, loss and z-loss; None where each row has its own loss
    M, V, ignore_index, label_smoothing, z_loss, softcap,  # the last three None where there is none
    EVERY_LSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    target, counts, weight = look_up(rows, M, V, target_ptr, target_stride, weight_ptr, weight_stride, ignore_index)
    read = rows < M if EVERY_LSE else counts
    logits_ptr += rows * logits_stride_m
    at_target = read_logits(logits_ptr + target * logits_stride_v, counts, softcap)
    LANES: tl.constexpr = BLOCK_V // 4
    highest = tl.full((BLOCK_M, LANES), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, LANES), tl.float32)
    smooth = tl.zeros((BLOCK_M, LANES), tl.float32)
    end = V * tl.max(read.to(tl.int32), 0)
    for start in range(0, end, BLOCK_V):
        cols = start + tl.arange(0, 4)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
        mask = read[:, None, None] & (cols < V)
        z = read_logits(logits_ptr[:, None, None] + cols.to(tl.int64) * logits_stride_v, mask, softcap)
        if label_smoothing is not None:
            weighted = z
            if weight_ptr is not None:
                weighted *= tl.load(weight_ptr + cols.to(tl.int64) * weight_stride, cols < V, other=0.0).to(tl.float32)
            smooth += tl.sum(weighted, 1)
        highest, total = online_step(highest, total, tl.where(mask, z, float("-inf")), 1)
    shift = finite(tl.max(highest, 1))
    log = tl.log2(tl.sum(total * tl.exp2(highest - shift[:, None]), 1))
    lse = (log + shift) / LOG2E
    # In this order, and rounded as in the loop, a large maximum cancels before the small logarithm is added.
    loss = weight * (log - tl.fma(at_target, LOG2E, -shift)) / LOG2E
    if label_smoothing is not None:
        weight_sum = V * 1.0 if weight_ptr is None else tl.load(weight_sum_ptr)
        loss += label_smoothing * ((weight_sum * lse - tl.sum(smooth, 1)) / V - loss)
    loss = tl.where(counts, loss, 0.0)
    z_part = tl.where(counts, 0.0 if z_loss is None else z_loss * lse * lse, 0.0)
    tl.store(lse_ptr + rows, lse, rows < M)
    if parts_ptr is None:
        tl.store(out_ptr + rows, loss + z_part, rows < M)
        tl.store(total_ptr + tl.arange(0, 2), 1.0)
    else:
        parts_ptr += tl.program_id(0)
        tl.store(parts_ptr, tl.sum(weight, 0))
        tl.store(parts_ptr + tl.num_programs(0), tl.sum(counts.to(tl.float32), 0))
        tl.store(parts_ptr + tl.num_programs(0) * 2, tl.sum(loss, 0))
        tl.store(parts_ptr + tl.num_programs(0) * 3, tl.sum(z_part, 0))


@triton.jit
def reduce_kernel(
    parts_ptr,  # (4, N), sums of weight, count, loss and z-loss
    out_ptr, total_ptr,  # one element, and (2,), what losses and z-losses are divided by
    N, MEAN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    out = 0.0
    for pair in tl.static_range(2):  # type: ignore
        weight = tl.zeros((BLOCK_N,), tl.float32)
        loss = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            weight += tl.load(parts_ptr + pair * N + cols, cols < N, other=0.0)
            loss += tl.load(parts_ptr + (pair + 2) * N + cols, cols < N, other=0.0)
        total = tl.sum(weight, 0) if MEAN else 1.0
        tl.store(total_ptr + pair, total)
        out += tl.sum(loss, 0) / total  # pyright: ignore
    tl.store(out_ptr, out)


@triton.jit
def cross_entropy_bwd_kernel(
    grad_out_ptr, grad_out_stride,  # (M,), or one element
    grad_lse_ptr, grad_lse_stride,  # (M,), or None
    logits_ptr, logits_stride_m, logits_stride_v,  # (M, V)
    target_ptr, target_stride,  # (M,)
    weight_ptr, weight_stride, weight_sum_ptr,  # (V,) and one element, or None
    lse_ptr, total_ptr,  # (M,), (2,)
    grad_logits_ptr, grad_logits_stride_m, grad_logits_stride_v,  # (M, V)
    M, V, first, classes,  # columns, the class of the first, all classes
    ignore_index, label_smoothing, z_loss, softcap,  # the last three None where there is none
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK_V)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    target, counts, weight = look_up(rows, M, classes, target_ptr, target_stride, weight_ptr, weight_stride, ignore_index)
    read = counts if grad_lse_ptr is None else rows < M
    logits_ptr += rows[:, None] * logits_stride_m + cols.to(tl.int64) * logits_stride_v
    z = read_logits(logits_ptr, read[:, None] & (cols < V), softcap)
    lse = tl.load(lse_ptr + rows, read, other=0.0)
    grad_out = tl.load(grad_out_ptr + rows * grad_out_stride, counts, other=0.0).to(tl.float32)
    # The gradient is softmax * on_softmax - one_hot(target) * on_target - each * weight.
    each = tl.where(counts, grad_out / tl.load(total_ptr), 0.0)
    on_target = each * weight
    on_softmax = on_target
    if label_smoothing is not None:
        each *= label_smoothing / classes
        on_target *= 1 - label_smoothing
        on_softmax = on_target + each * (classes if weight_ptr is None else tl.load(weight_sum_ptr))
    if z_loss is not None:
        on_softmax += tl.where(counts, 2 * z_loss * lse * grad_out / tl.load(total_ptr + 1), 0.0)
    if grad_lse_ptr is not None:
        on_softmax += tl.load(grad_lse_ptr + rows * grad_lse_stride, read, other=0.0).to(tl.float32)
    grad = tl.exp(z - lse[:, None]) * on_softmax[:, None]
    grad -= tl.where(first + cols == target.to(tl.int32)[:, None], on_target[:, None], 0.0)
    if label_smoothing is not None:
        smooth = each[:, None]
        if weight_ptr is not None:
            smooth *= tl.load(weight_ptr + (first + cols).to(tl.int64) * weight_stride, cols < V, other=0.0).to(tl.float32)
        grad -= smooth
    if softcap is not None:
        grad *= 1 - (z / softcap) * (z / softcap)
    grad_logits_ptr += rows[:, None] * grad_logits_stride_m + cols.to(tl.int64) * grad_logits_stride_v
    tl.store(grad_logits_ptr, tl.where(read[:, None], grad, 0.0), (rows < M)[:, None] & (cols < V))


SPACE: dict[str, tuple[int, ...]] = {
    "BLOCK_M": (1, 2, 4, 8, 16, 32, 64),
    "BLOCK_V": (1024, 2048, 4096, 8192, 16384, 32768),
    "num_warps": (2, 4, 8, 16, 32),
}


@configured(**SPACE)
def cross_entropy_fwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    wide = blocks(M, V, 4096 if M > 256 else 32768)  # Few rows take wide programs.
    return wide | {"num_warps": min(wide["num_warps"], where.warps)}


@configured(**SPACE)
def cross_entropy_bwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    return blocks(M, V, 4096)


def weights(weight: Tensor | None, label_smoothing: float) -> tuple[Tensor | None, int, Tensor | None]:
    """The weight, its stride and, for label smoothing, its sum."""
    weight_sum = weight.sum(dtype=torch.float32) if weight is not None and label_smoothing else None
    return weight, 0 if weight is None else weight.stride(0), weight_sum


def cross_entropy_fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float,
    z_loss: float, softcap: float | None, dtype: torch.dtype | None, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (M, V), alone = logits.shape, reduction == "none"
    config = cross_entropy_fwd_config(logits.get_device(), M, V, logits.itemsize)
    programs = triton.cdiv(M, config["BLOCK_M"])
    lse, total = logits.new_empty(M, dtype=torch.float32), logits.new_empty(2, dtype=torch.float32)
    out = logits.new_empty(M if alone else (), dtype=dtype or logits.dtype)
    parts = None if alone else lse.new_empty(4, programs)
    launch(
        cross_entropy_fwd_kernel, (programs,), logits, *logits.stride(), target, target.stride(0),
        *weights(weight, label_smoothing), lse, out, total, parts, M, V, ignore_index, label_smoothing or None, z_loss or None,
        softcap, return_lse, config["BLOCK_M"], config["BLOCK_V"], num_warps=config["num_warps"],
    )  # fmt: skip
    if parts is not None:
        launch(reduce_kernel, (1,), parts, out, total, programs, reduction == "mean", 4096, num_warps=16)
    return out, lse, total


def write_grad(
    grad_out: Tensor, grad_lse: Tensor | None, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor,
    total: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, first: int, classes: int,
    grad_logits: Tensor,
) -> None:  # fmt: skip
    """The gradient of logits, which are those of classes from `first` on; it may take their place."""
    M, V = logits.shape
    config = cross_entropy_bwd_config(logits.get_device(), M, V, logits.itemsize)
    block_m, block_v = config["BLOCK_M"], config["BLOCK_V"]
    launch(
        cross_entropy_bwd_kernel, (triton.cdiv(M, block_m) * triton.cdiv(V, block_v),),
        grad_out, grad_out.stride(0) if grad_out.ndim else 0, grad_lse, 0 if grad_lse is None else grad_lse.stride(0),
        logits, *logits.stride(), target, target.stride(0), *weights(weight, label_smoothing), lse, total, grad_logits,
        *grad_logits.stride(), M, V, first, classes, ignore_index, label_smoothing or None, z_loss or None, softcap, block_m,
        block_v, num_warps=config["num_warps"],
    )  # fmt: skip


def cross_entropy_bwd(
    grad_out: Tensor, grad_lse: Tensor | None, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor,
    total: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
) -> tuple[Tensor]:  # fmt: skip
    grad_logits = torch.empty_like(logits)
    options = ignore_index, label_smoothing, z_loss, softcap
    write_grad(grad_out, grad_lse, logits, target, weight, lse, total, *options, 0, logits.shape[1], grad_logits)
    return (grad_logits,)


cross_entropy = op.implement(cross_entropy_fwd, cross_entropy_bwd)

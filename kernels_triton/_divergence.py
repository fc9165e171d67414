"""Divergences of two distributions: a forward over rows, and a backward over tiles, from logits or log-probabilities.

With logits the forward's first pass keeps a running maximum and sum of each lane, and all that KL needs; other terms take a
second pass, backwards, whose beginning is still in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels_reference._config import Choice, Gpu, gpu

from ._launch import launch
from ._online import LOG2E, blocks, finite

Maybe = Tensor | None
LEAST = tl.constexpr(2.0**-126)
"""The fast logarithm takes what is less for 0."""


@triton.jit
def exp(x, EXACT: tl.constexpr):
    # The fast one rounds its argument, which float32 would show.
    return libdevice.exp(x) if EXACT else tl.exp2(x * LOG2E)


@triton.jit
def log(x, EXACT: tl.constexpr):
    return libdevice.log(x) if EXACT else libdevice.fast_log2f(x) / LOG2E


@triton.jit
def terms(x, y, beta, PROBABILITIES: tl.constexpr, EXACT: tl.constexpr):
    """A term, and its derivatives for log(Q), x, and log(P), y, or for P itself where y is that. Of KL where beta is None."""
    if beta is None:
        if PROBABILITIES:
            p = y
            difference = log(tl.where(tl.abs(p) < LEAST, LEAST, p), EXACT) - x  # pyright: ignore
        else:
            p = exp(y, EXACT)
            difference = y - x
        term = tl.where(p == 0, 0.0, p * difference)
        grad_x = -p  # pyright: ignore
        grad_y = tl.where(p == 0, 0.0, difference + 1) if PROBABILITIES else term + p
    else:
        difference = y - x
        share = tl.where(difference > 0, 1 - beta, beta)
        larger = exp(tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL), EXACT)
        apart = tl.where(larger == 0, 0.0, tl.abs(difference))
        # By the distance of the larger from the smaller nothing overflows, and what is close does not cancel.
        if EXACT:
            smaller = exp(tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL), EXACT)
            above = -libdevice.log1p(share * libdevice.expm1(-apart))  # pyright: ignore
        else:
            ratio = tl.exp2(apart * -LOG2E)
            smaller = larger * ratio
            above = -log(1 - share + share * ratio, EXACT)  # pyright: ignore
        larger_term = (1 - share) * larger * above
        smaller_term = tl.where(smaller == 0, 0.0, share * smaller * (above - apart))
        term = larger_term + smaller_term
        grad_x = tl.where(difference > 0, smaller_term, larger_term)
        grad_y = tl.where(difference > 0, larger_term, smaller_term)
    return term, grad_x, grad_y


@triton.jit
def counted(rows, M, labels_ptr, labels_stride, ignore_index):
    counts = rows < M
    if labels_ptr is not None:
        counts = counts & (tl.load(labels_ptr + rows * labels_stride, counts, other=0).to(tl.int64) != ignore_index)
    return counts


@triton.jit
def read_logs(logs_ptr, rows, M, counts):
    most_x = tl.load(logs_ptr + rows, counts, other=0.0)
    most_y = tl.load(logs_ptr + M + rows, counts, other=0.0)
    log_x = tl.load(logs_ptr + M * 2 + rows, counts, other=0.0)
    log_y = tl.load(logs_ptr + M * 3 + rows, counts, other=0.0)
    return most_x, most_y, log_x, log_y


@triton.jit
def row_sum(highest, total):
    """Of the lanes' maxima and sums of exponentials over them, those of the row."""
    shift = finite(tl.max(highest, 1))
    return shift, tl.sum(total * tl.exp2(highest - shift[:, None]), 1)


@triton.jit
def row_log(shift, log):
    """The logarithm of the sum in two parts: a maximum, and what is over it."""
    # Exponents are of differences to `shift`, which is this times LOG2E but for a rounding, large where logits are.
    most = shift / LOG2E
    return most, log + tl.fma(most, -LOG2E, shift) / LOG2E


@triton.jit
def moved(apart, total_y, from_x, from_y, to_x, to_y):
    """The sum of p times the distance of both logarithms, after a change of what is subtracted from them; p was summed, too."""
    rescale = tl.exp2(from_y - to_y)
    change = (finite(from_y) - to_y) - (finite(from_x) - to_x)
    return tl.where(rescale == 0, 0.0, (apart + total_y * change) * rescale)


@triton.jit
def divergence_fwd_kernel(
    x_ptr, x_stride_m, x_stride_v, y_ptr, y_stride_m, y_stride_v,  # (M, V)
    labels_ptr, labels_stride,  # (M,), or None
    weight_ptr, weight_stride_m, weight_stride_v,  # (M, V), of the derivatives; None for a forward
    out_ptr, out_stride_m, out_stride_v,  # (M, V), or None
    logs_ptr, sums_ptr,  # (4, M), largest logits, and logarithms of the sums of exponentials; (2, M), of the derivatives
    total_ptr, parts_ptr,  # one element; (2, programs), counts and losses, or None
    M, V, ignore_index, scale, beta,  # the scale, of logits, is one over the temperature; it and beta may be None
    PROBABILITIES: tl.constexpr, EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    counts = counted(rows, M, labels_ptr, labels_stride, ignore_index)
    x_ptr += (rows * x_stride_m)[:, None, None]
    y_ptr += (rows * y_stride_m)[:, None, None]
    LANES: tl.constexpr = BLOCK_V // 4
    lanes = tl.arange(0, 4)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    blocks = tl.cdiv(V, BLOCK_V) * tl.max(counts.to(tl.int32), 0)
    most_x = tl.zeros((BLOCK_M,), tl.float32)
    most_y = tl.zeros((BLOCK_M,), tl.float32)
    log_x = tl.zeros((BLOCK_M,), tl.float32)
    log_y = tl.zeros((BLOCK_M,), tl.float32)
    loss = tl.zeros((BLOCK_M,), tl.float32)
    sum_x = tl.zeros((BLOCK_M,), tl.float32)
    sum_y = tl.zeros((BLOCK_M,), tl.float32)
    if weight_ptr is not None:
        most_x, most_y, log_x, log_y = read_logs(logs_ptr, rows, M, counts)
    elif scale is not None:
        highest_x = tl.full((BLOCK_M, LANES), float("-inf"), tl.float32)
        highest_y = tl.full((BLOCK_M, LANES), float("-inf"), tl.float32)
        total_x = tl.zeros((BLOCK_M, LANES), tl.float32)
        total_y = tl.zeros((BLOCK_M, LANES), tl.float32)
        apart = tl.zeros((BLOCK_M, LANES), tl.float32)
        for block in range(blocks):
            cols = block * BLOCK_V + lanes
            mask = counts[:, None, None] & (cols < V)
            x = tl.load(x_ptr + cols.to(tl.int64) * x_stride_v, mask, other=float("-inf")).to(tl.float32) * scale
            y = tl.load(y_ptr + cols.to(tl.int64) * y_stride_v, mask, other=float("-inf")).to(tl.float32) * scale
            before_x, before_y = highest_x, highest_y
            highest_x = tl.maximum(before_x, tl.max(x, 1) * LOG2E)
            highest_y = tl.maximum(before_y, tl.max(y, 1) * LOG2E)
            shift_x, shift_y = finite(highest_x), finite(highest_y)
            log_q = tl.fma(x, LOG2E, -shift_x[:, None, :])
            log_p = tl.fma(y, LOG2E, -shift_y[:, None, :])
            apart = moved(apart, total_y, before_x, before_y, shift_x, shift_y)
            p = tl.exp2(log_p)
            apart += tl.sum(tl.where(p == 0, 0.0, p * (log_p - log_q)), 1)
            total_x = total_x * tl.exp2(before_x - shift_x) + tl.sum(tl.exp2(log_q), 1)
            total_y = total_y * tl.exp2(before_y - shift_y) + tl.sum(p, 1)
        to_x, sum_q = row_sum(highest_x, total_x)
        to_y, sum_p = row_sum(highest_y, total_y)
        log_x, log_y = libdevice.log(sum_q), libdevice.log(sum_p)
        apart = tl.sum(moved(apart, total_y, highest_x, highest_y, to_x[:, None], to_y[:, None]), 1)
        loss = apart / sum_p / LOG2E - (log_y - log_x)  # pyright: ignore
        most_x, log_x = row_log(to_x, log_x)
        most_y, log_y = row_log(to_y, log_y)
        sum_x -= 1
        sum_y = loss + 1
    if weight_ptr is not None or out_ptr is not None or scale is None or beta is not None:
        loss_of = tl.zeros((BLOCK_M, LANES), tl.float32)
        sum_x_of = tl.zeros((BLOCK_M, LANES), tl.float32)
        sum_y_of = tl.zeros((BLOCK_M, LANES), tl.float32)
        if out_ptr is not None:
            blocks = tl.cdiv(V, BLOCK_V)
        for back in range(blocks):
            cols = (blocks - 1 - back) * BLOCK_V + lanes
            mask = counts[:, None, None] & (cols < V)
            x = tl.load(x_ptr + cols.to(tl.int64) * x_stride_v, mask, other=0.0).to(tl.float32)
            y = tl.load(y_ptr + cols.to(tl.int64) * y_stride_v, mask, other=0.0).to(tl.float32)
            if scale is not None:
                x = x * scale - most_x[:, None, None] - log_x[:, None, None]
                y = y * scale - most_y[:, None, None] - log_y[:, None, None]
            term, grad_x, grad_y = terms(x, y, beta, PROBABILITIES, EXACT)
            term = tl.where(mask, term, 0.0)
            if weight_ptr is not None:
                weights = weight_ptr + (rows * weight_stride_m)[:, None, None] + cols.to(tl.int64) * weight_stride_v
                weight = tl.load(weights, mask, other=0.0).to(tl.float32)
                grad_x *= weight
                grad_y *= weight
            if out_ptr is not None:
                outs = out_ptr + (rows * out_stride_m)[:, None, None] + cols.to(tl.int64) * out_stride_v
                tl.store(outs, term, (rows < M)[:, None, None] & (cols < V))
            else:
                loss_of += tl.sum(term, 1)
                if scale is not None:
                    sum_x_of += tl.sum(tl.where(mask, grad_x, 0.0), 1)
                    sum_y_of += tl.sum(tl.where(mask, grad_y, 0.0), 1)
        loss, sum_x, sum_y = tl.sum(loss_of, 1), tl.sum(sum_x_of, 1), tl.sum(sum_y_of, 1)
    tl.store(sums_ptr + rows, tl.where(counts, sum_x, 0.0), rows < M)
    tl.store(sums_ptr + M + rows, tl.where(counts, sum_y, 0.0), rows < M)
    if weight_ptr is None:
        tl.store(logs_ptr + rows, tl.where(counts, most_x, 0.0), rows < M)
        tl.store(logs_ptr + M + rows, tl.where(counts, most_y, 0.0), rows < M)
        tl.store(logs_ptr + M * 2 + rows, tl.where(counts, log_x, 0.0), rows < M)
        tl.store(logs_ptr + M * 3 + rows, tl.where(counts, log_y, 0.0), rows < M)
        if parts_ptr is None:
            tl.store(total_ptr, 1.0)
        else:
            parts_ptr += tl.program_id(0)
            tl.store(parts_ptr, tl.sum(counts.to(tl.float32), 0))
            tl.store(parts_ptr + tl.num_programs(0), tl.sum(tl.where(counts, loss, 0.0), 0))


@triton.jit
def reduce_kernel(
    parts_ptr, out_ptr, total_ptr,  # (2, N), counts and losses; the result; what it is divided by
    N, divisor, PER_ROW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    count = tl.zeros((BLOCK_N,), tl.float32)
    loss = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        count += tl.load(parts_ptr + cols, cols < N, other=0.0)
        loss += tl.load(parts_ptr + N + cols, cols < N, other=0.0)
    total = divisor * (tl.sum(count, 0) if PER_ROW else 1.0)
    tl.store(total_ptr, total)
    tl.store(out_ptr, tl.sum(loss, 0) / total)  # pyright: ignore


@triton.jit
def divergence_bwd_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_v,  # (M, V), or one element
    x_ptr, x_stride_m, x_stride_v, y_ptr, y_stride_m, y_stride_v,  # (M, V)
    labels_ptr, labels_stride,  # (M,), or None
    logs_ptr, sums_ptr, total_ptr,  # (4, M); (2, M); one element
    grad_x_ptr, grad_x_stride_m, grad_x_stride_v, grad_y_ptr, grad_y_stride_m, grad_y_stride_v,  # (M, V), or None
    M, V, ignore_index, scale, beta,  # the last two may be None
    ALONE: tl.constexpr, PROBABILITIES: tl.constexpr, EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, BLOCK_V)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    counts = counted(rows, M, labels_ptr, labels_stride, ignore_index)
    cols = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    mask, within = counts[:, None] & (cols < V), (rows < M)[:, None] & (cols < V)
    x_ptr += (rows * x_stride_m)[:, None] + cols.to(tl.int64) * x_stride_v
    y_ptr += (rows * y_stride_m)[:, None] + cols.to(tl.int64) * y_stride_v
    x = tl.load(x_ptr, mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr, mask, other=0.0).to(tl.float32)
    if scale is not None:
        most_x, most_y, log_x, log_y = read_logs(logs_ptr, rows, M, counts)
        x = x * scale - most_x[:, None] - log_x[:, None]
        y = y * scale - most_y[:, None] - log_y[:, None]
    _, grad_x, grad_y = terms(x, y, beta, PROBABILITIES, EXACT)
    if ALONE:
        grad_out_ptr += (rows * grad_out_stride_m)[:, None] + cols.to(tl.int64) * grad_out_stride_v
        weight, each = tl.load(grad_out_ptr, mask, other=0.0).to(tl.float32), 1.0
    else:
        each = tl.load(grad_out_ptr).to(tl.float32) / tl.load(total_ptr)
        weight = each
    grad_x *= weight
    grad_y *= weight
    if scale is not None:
        sum_x = tl.load(sums_ptr + rows, counts, other=0.0) * each
        sum_y = tl.load(sums_ptr + M + rows, counts, other=0.0) * each
        grad_x = (grad_x - exp(x, EXACT) * sum_x[:, None]) * scale
        grad_y = (grad_y - exp(y, EXACT) * sum_y[:, None]) * scale
    if grad_x_ptr is not None:
        grad_x_ptr += (rows * grad_x_stride_m)[:, None] + cols.to(tl.int64) * grad_x_stride_v
        tl.store(grad_x_ptr, tl.where(mask, grad_x, 0.0), within)
    if grad_y_ptr is not None:
        grad_y_ptr += (rows * grad_y_stride_m)[:, None] + cols.to(tl.int64) * grad_y_stride_v
        tl.store(grad_y_ptr, tl.where(mask, grad_y, 0.0), within)


SPACE: dict[str, tuple[int, ...]] = {
    "BLOCK_M": (1, 2, 4, 8, 16, 32, 64),
    "BLOCK_V": (1024, 2048, 4096, 8192, 16384),
    "num_warps": (2, 4, 8, 16, 32),
}


def fwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    wide = blocks(M, V, 4096 if M > 256 else 8192)  # Few rows take wide programs.
    return wide | {"num_warps": min(wide["num_warps"], where.warps)}


def bwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    return blocks(M, V, 2048)


def exact(*tensors: Tensor) -> bool:
    """Half precision hides the errors of faster functions, which AMD has not."""
    return any(t.dtype == torch.float32 for t in tensors) or gpu(tensors[0].get_device()).arch.startswith("gfx")


def strides(t: Maybe) -> tuple[int, ...]:
    return (0, 0) if t is None or t.ndim < 2 else t.stride()


def over_rows(
    choice: Choice, x: Tensor, y: Tensor, labels: Maybe, weight: Maybe, out: Maybe, logs: Tensor, sums: Tensor, total: Maybe,
    ignore_index: int, temperature: float | None, beta: float | None, probabilities: bool,
) -> Tensor | None:  # fmt: skip
    """Launches the forward's kernel; what it returns is to be reduced, where there is no other output."""
    (M, V), config = x.shape, choice(x.get_device(), *x.shape, x.itemsize)
    programs = triton.cdiv(M, config["BLOCK_M"])
    parts = logs.new_empty(2, programs) if out is None and weight is None else None
    launch(
        divergence_fwd_kernel, (programs,), x, *x.stride(), y, *y.stride(), labels, 0 if labels is None else labels.stride(0),
        weight, *strides(weight), out, *strides(out), logs, sums, total, parts, M, V, ignore_index,
        None if temperature is None else 1 / temperature, beta, probabilities, exact(x, y), config["BLOCK_M"],
        config["BLOCK_V"], num_warps=config["num_warps"],
    )  # fmt: skip
    return parts


def forward(
    choice: Choice, x: Tensor, y: Tensor, labels: Maybe, ignore_index: int, temperature: float | None, beta: float | None,
    probabilities: bool, reduction: str, divide: tuple[float, bool], dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`divide` is what the sum is divided by, and whether for each row that counts."""
    M, alone = x.size(0), reduction == "none"
    out = x.new_empty(x.shape if alone else (), dtype=dtype)
    logs, sums, total = (x.new_empty(*shape, dtype=torch.float32) for shape in ((4, M), (2, M), (1,)))
    options = ignore_index, temperature, beta, probabilities
    parts = over_rows(choice, x, y, labels, None, out if alone else None, logs, sums, total, *options)
    if parts is not None:
        launch(reduce_kernel, (1,), parts, out, total, parts.size(1), *divide, 4096, num_warps=16)
    return out, logs, sums, total


def backward(
    choices: tuple[Choice, Choice], grad_out: Tensor, x: Tensor, y: Tensor, labels: Maybe, logs: Tensor, sums: Tensor,
    total: Tensor, ignore_index: int, temperature: float | None, beta: float | None, probabilities: bool,
    needs: tuple[bool, bool],
) -> tuple[Maybe, Maybe]:  # fmt: skip
    grad_x, grad_y = torch.empty_like(x) if needs[0] else None, torch.empty_like(y) if needs[1] else None
    options = ignore_index, temperature, beta, probabilities
    if grad_out.ndim and temperature is not None:
        sums = torch.empty_like(sums)
        over_rows(choices[0], x, y, labels, grad_out, None, logs, sums, None, *options)
    (M, V), config = x.shape, choices[1](x.get_device(), *x.shape, x.itemsize)
    block_m, block_v = config["BLOCK_M"], config["BLOCK_V"]
    launch(
        divergence_bwd_kernel, (triton.cdiv(M, block_m) * triton.cdiv(V, block_v),), grad_out, *strides(grad_out),
        x, *x.stride(), y, *y.stride(), labels, 0 if labels is None else labels.stride(0), logs, sums, total,
        grad_x, *strides(grad_x), grad_y, *strides(grad_y), M, V, ignore_index,
        None if temperature is None else 1 / temperature, beta, grad_out.ndim > 0, probabilities, exact(x, y),
        block_m, block_v, num_warps=config["num_warps"],
    )  # fmt: skip
    return grad_x, grad_y

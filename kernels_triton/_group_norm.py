"""The kernels of group norm: sums of channels and what is made of them, forward and backward."""

import triton
import triton.language as tl

from kernels_reference._config import Gpu

from ._launch import configured, next_power_of_2


@triton.jit
def load_vector(ptr, stride, at, mask, missing):
    """Of the channels, or what stands for one that is not there."""
    return missing if ptr is None else tl.load(ptr + at * stride, mask, other=0.0).to(tl.float32)


@triton.jit
def load_both(x_ptr, x_stride, grad_ptr, grad_stride, at, mask):
    """x and grad; without a grad, x twice."""
    x = tl.load(x_ptr + at * x_stride, mask, other=0.0).to(tl.float32)
    return x, x if grad_ptr is None else tl.load(grad_ptr + at * grad_stride, mask, other=0.0).to(tl.float32)


@triton.jit
def terms(x, grad, mean, rstd, mask, forward):
    if forward:
        one = tl.where(mask, x - mean, 0.0)
        two = one * one
    else:
        one = grad
        two = grad * ((x - mean) * rstd)
    return one, two


@triton.jit(do_not_specialize=["G", "K", "splits"])
def group_norm_kernel(
    x_ptr, x_stride_n, x_stride_c, x_stride_p,  # (N, C, P)
    grad_ptr, grad_stride_n, grad_stride_c, grad_stride_p,  # (N, C, P), or None: forward
    weight_ptr, weight_stride, bias_ptr, bias_stride,  # (C,), or None
    mean_ptr, rstd_ptr, average_ptr, dot_ptr,  # (N, G), the last two the means of grad * weight and of that * normed
    one_ptr, two_ptr,  # (N, splits, C), each channel's sums of grad and of grad * normed; or None
    out_ptr, out_stride_n, out_stride_c, out_stride_p,  # (N, C, P), out or grad_x; or None
    C, P, G, K, splits, length, eps,
    MODE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """A program has the channels of a group or BLOCK_C, and `length` positions. It sums up, it applies what is known or, with
    a whole group, it does both. Forward, sums are a channel's mean and its sum of squared distances to that."""
    # What was read last is still in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if MODE == "apply" else tl.program_id(0)
    channels = K if MODE == "whole" else BLOCK_C
    row = block // tl.cdiv(C, channels)
    n = (row // splits).to(tl.int64)
    begin = row % splits * length
    count = tl.minimum(length, P - begin)
    channel = (block % tl.cdiv(C, channels) * channels + tl.arange(0, BLOCK_C)[:, None]).to(tl.int64)
    live = (tl.arange(0, BLOCK_C)[:, None] < channels) & (channel < C)
    cols = begin + tl.arange(0, BLOCK_P)[None, :].to(tl.int64)
    x_ptr += n * x_stride_n + channel * x_stride_c
    if grad_ptr is not None:
        grad_ptr += n * grad_stride_n + channel * grad_stride_c
    x, grad = load_both(x_ptr, x_stride_p, grad_ptr, grad_stride_p, cols, live & (cols < P))
    group = n * G + channel // K
    mean = 0.0
    rstd = 0.0
    if grad_ptr is not None or MODE == "apply":
        mean = tl.load(mean_ptr + group, live, other=0.0)
        rstd = tl.load(rstd_ptr + group, live, other=0.0)
    weight = load_vector(weight_ptr, weight_stride, channel, live, 1.0)
    bias = load_vector(bias_ptr, bias_stride, channel, live, 0.0)
    average = load_vector(average_ptr, 1, group, live, 0.0)
    dot = load_vector(dot_ptr, 1, group, live, 0.0)
    if MODE != "apply":
        if grad_ptr is None:
            # The mean of the first tile is near enough to that of all for no digits to cancel.
            mean = tl.sum(x, axis=1, keep_dims=True) / tl.minimum(BLOCK_P, count)
        one, two = terms(x, grad, mean, rstd, live & (cols < P), grad_ptr is None)
        for start in range(BLOCK_P, count if LOOPED else BLOCK_P, BLOCK_P):
            mask = live & (start + cols < P)
            more, more_grad = load_both(x_ptr, x_stride_p, grad_ptr, grad_stride_p, start + cols, mask)
            more_one, more_two = terms(more, more_grad, mean, rstd, mask, grad_ptr is None)
            one += more_one
            two += more_two
        one = tl.sum(one, axis=1, keep_dims=True)
        two = tl.sum(two, axis=1, keep_dims=True)
        if grad_ptr is None:
            two -= one * one / count
            one = mean + one / count
        if one_ptr is not None:
            tl.store(one_ptr + row.to(tl.int64) * C + channel, one, live)
        if two_ptr is not None:
            tl.store(two_ptr + row.to(tl.int64) * C + channel, two, live)
        if grad_ptr is not None:
            average = tl.sum(weight * one) / K / P
            dot = tl.sum(weight * two) / K / P
        elif MODE == "whole":
            mean = tl.sum(tl.where(live, one, 0.0)) / K
            away = tl.where(live, one - mean, 0.0)
            rstd = tl.rsqrt((tl.sum(two) / P + tl.sum(away * away)) / K + eps)
            tl.store(mean_ptr + block, mean)
            tl.store(rstd_ptr + block, rstd)
    if out_ptr is not None:
        out_ptr += n * out_stride_n + channel * out_stride_c
        for start in range(0, count if LOOPED else BLOCK_P, BLOCK_P):
            mask = live & (start + cols < P)
            if LOOPED:
                x, grad = load_both(x_ptr, x_stride_p, grad_ptr, grad_stride_p, start + cols, mask)
            normed = (x - mean) * rstd
            out = normed * weight + bias if grad_ptr is None else rstd * (grad * weight - normed * dot - average)
            tl.store(out_ptr + (start + cols) * out_stride_p, out, mask)


@triton.jit(do_not_specialize=["N", "C", "P", "G", "K", "splits", "length"])
def group_norm_combine_kernel(
    one_ptr, two_ptr,  # (N, splits, C), each channel's sums
    weight_ptr, weight_stride,  # (C,), or None
    mean_ptr, rstd_ptr,  # (N, G), or backward `average` and `dot`; or None
    grad_weight_ptr, grad_bias_ptr,  # (C,), or None
    N, C, P, G, K, splits, length, eps,  # eps is None backward
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The first programs have a group each, if `mean_ptr` is there; the others have columns of the gradients."""
    group = tl.program_id(0).to(tl.int64)
    groups = 0 if mean_ptr is None else N * G
    grouped = group < groups
    first_row = tl.where(grouped, group // G * splits, 0)
    last_row = tl.where(grouped, first_row + splits, N * splits)
    first = tl.where(grouped, group % G * K, (group - groups) * COLS)
    last = tl.where(grouped, first + K, C)
    # Near enough to the mean of all for no digits to cancel.
    shift = 0.0 if eps is None else tl.load(one_ptr + first_row * C + first)
    ones = tl.zeros((ROWS, COLS), tl.float32)
    twos = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, tl.where(grouped, K, 1), COLS):
        cols = first + start + tl.arange(0, COLS)[None, :]
        scale = tl.where(grouped, load_vector(weight_ptr, weight_stride, cols, cols < last, 1.0), 1.0)
        for row in range(first_row, last_row, ROWS):
            rows = row + tl.arange(0, ROWS)[:, None]
            mask = (rows < last_row) & (cols < last)
            one = tl.load(one_ptr + rows * C + cols, mask, other=0.0)
            two = tl.load(two_ptr + rows * C + cols, mask, other=0.0)
            if eps is None:
                ones += one * scale
                twos += two * scale
            else:
                count = tl.minimum(length, P - (rows - first_row) * length)
                away = tl.where(mask, one - shift, 0.0)
                ones += away * count
                twos += away * away * count + two
    if grouped:
        average = tl.sum(ones) / K / P
        square = tl.sum(twos) / K / P
        if mean_ptr is not None:
            tl.store(mean_ptr + group, shift + average)
            tl.store(rstd_ptr + group, square if eps is None else tl.rsqrt(square - average * average + eps))
    else:
        cols = first + tl.arange(0, COLS)[None, :]
        if grad_bias_ptr is not None:
            tl.store(grad_bias_ptr + cols, tl.sum(ones, axis=0, keep_dims=True), cols < C)
        if grad_weight_ptr is not None:
            tl.store(grad_weight_ptr + cols, tl.sum(twos, axis=0, keep_dims=True), cols < C)


@configured(BLOCK_P=(128, 256, 512, 1024, 2048, 4096, 8192, 16384), num_warps=(1, 2, 4, 8, 16, 32))
def group_norm_whole_config(where: Gpu, M: int, K: int, P: int, itemsize: int) -> dict[str, int]:
    height, width, thread = next_power_of_2(K), next_power_of_2(P), 16
    # What does not begin at a multiple of 16 bytes is read by the element, each with an address in registers.
    if height * width > (16384 if P % 8 == 0 else 4096):
        # Where there are fewer groups than processors take, each is worked on by more threads.
        few = M < 2 * where.processors
        width = max((8192 if few else 4096) // height, 1)
        thread = 8 if few else 16
    thread = thread if P % 8 == 0 else 8
    return {"BLOCK_P": width, "num_warps": min(max(height * width // (32 * thread), 1), where.warps)}


@configured(TILE=(2048, 4096, 8192), num_warps=(4, 8, 16), PROGRAMS=(2, 4, 8, 16))
def group_norm_split_config(where: Gpu, N: int, C: int, P: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 4096, "num_warps": 16 if (C if column_major else P) % 8 else 8, "PROGRAMS": 8}

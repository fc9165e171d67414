"""The kernels of group norm: sums of channels and what is made of them, forward and backward."""
# pyright: reportPossiblyUnboundVariable=false

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference._group_norm import Opt

from ._kernel import Config, kernel, next_power_of_2


def sizes(x: Tensor, *_: Any) -> dict[str, int]:
    M, B, P = x.shape
    return {"M": M, "B": B, "P": P, "itemsize": x.itemsize, "side_by_side": x.stride(1) == 1}


def config(x: Tensor, *rest: Any) -> Config:
    *_, height, length, _ = rest
    where, (M, B, P) = gpu(x.get_device()), x.shape
    # Where there are fewer groups than processors take, each is worked on by more threads.
    few = length == P and M < 2 * where.processors
    width = min(max((8192 if few else 4096) // height, 1), next_power_of_2(P))
    # What does not begin at a multiple of 16 bytes is read by the element, each with an address in registers.
    thread = 8 if few or (B if x.stride(1) == 1 else P) % 8 else 16
    return {"block_sizes": [width], "num_warps": min(max(height * width // (32 * thread), 1), where.warps)}


@kernel(config, sizes)
def group_norm_kernel(
    x, grad, weight, bias, mean, rstd, average, dot, new_mean, new_rstd, ones, twos, out, mode: hl.constexpr, A: int, K: int,
    eps: float, height: int, length: int, per_row: int,
) -> None:  # fmt: skip
    """x, grad and out are (M, B, P): rows of a group's or of all channels, which A rows together have; weight and bias (C,);
    sums (splits * M, B), forward a channel's mean and its sum of squared distances to that; the others (N * G,)."""
    M, B, P = x.size()
    height = hl.specialize(height)
    width = hl.register_block_size(P)
    for m, s, c in hl.tile([M, -(-P // length), B], block_size=[1, 1, height]):
        live = c.index < B
        begin = s.begin * length
        end = min(begin + length, P)
        count = end - begin
        channel = m.begin % A * B + c.index
        group = m.begin * per_row + c.index // K
        if mean is not None:
            centre = hl.load(mean, [group], live)
            inverse = hl.load(rstd, [group], live)
        if weight is not None:
            scale = hl.load(weight, [channel], live).float()
        if mode != "apply":
            one = hl.zeros([c, width])
            two = hl.zeros([c, width])
            if grad is None:
                at = begin + hl.arange(width)
                # The mean of the first tile is near enough to that of all for no digits to cancel.
                first = hl.load(x, [m.begin, c, at], (at < end)[None, :] & live[:, None]).float()
                centre = first.sum(dim=1) / min(count, width)
            for p in hl.tile(begin, end, block_size=width):
                value = x[m.begin, c, p].float() - centre[:, None]
                if grad is None:
                    value = torch.where((p.index < end)[None, :], value, 0.0)
                    one = one + value
                    two = two + value * value
                else:
                    given = grad[m.begin, c, p].float()
                    one = one + given
                    two = two + given * value * inverse[:, None]
            on_one = one.sum(dim=1)
            on_two = two.sum(dim=1)
            if grad is None:
                on_two = on_two - on_one * on_one / count
                on_one = centre + on_one / count
            if ones is not None:
                ones[s.begin * M + m.begin, c] = on_one
                twos[s.begin * M + m.begin, c] = on_two
            if mode == "whole":
                if grad is None:
                    group_mean = on_one.sum(dim=0, keepdim=True) / K
                    away = on_one - group_mean
                    group_rstd = torch.rsqrt((on_two / P + away * away).sum(dim=0, keepdim=True) / K + eps)
                    new_mean[m] = group_mean
                    new_rstd[m] = group_rstd
                    centre = hl.zeros([c]) + group_mean
                    inverse = hl.zeros([c]) + group_rstd
                else:
                    if weight is not None:
                        on_one = on_one * scale
                        on_two = on_two * scale
                    offset = hl.zeros([c]) + on_one.sum(dim=0, keepdim=True) / K / P
                    slope = hl.zeros([c]) + on_two.sum(dim=0, keepdim=True) / K / P
        if average is not None:
            offset = hl.load(average, [group], live)
            slope = hl.load(dot, [group], live)
        if out is not None:
            for p in hl.tile(begin, end, block_size=width):
                normed = (x[m.begin, c, p].float() - centre[:, None]) * inverse[:, None]
                if grad is None:
                    result = normed
                    if weight is not None:
                        result = result * scale[:, None]
                    if bias is not None:
                        result = result + hl.load(bias, [channel], live).float()[:, None]
                else:
                    result = grad[m.begin, c, p].float()
                    if weight is not None:
                        result = result * scale[:, None]
                    result = (result - normed * slope[:, None] - offset[:, None]) * inverse[:, None]
                out[m.begin, c, p] = result.to(out.dtype)


def combine_config(ones: Tensor, *_: Any) -> Config:
    rows, cols = (min(next_power_of_2(size), most) for size, most in zip(ones.shape[::2], (32, 64), strict=True))
    return {"block_sizes": [rows, cols], "num_warps": 4}


@kernel(combine_config, lambda ones, *_: {"splits": ones.size(0), "M": ones.size(1), "K": ones.size(2)})
def group_norm_combine_kernel(
    ones: Tensor, twos: Tensor, weight: Opt, mean: Tensor, rstd: Tensor, G: int, P: int, length: int, eps: float | None
) -> None:
    """Of each group's channels' and splits' sums (splits, N * G, K), to (N * G,); eps is None backward."""
    splits, M, K = ones.size()
    height = hl.register_block_size(splits)
    width = hl.register_block_size(K)
    for m in hl.tile(M, block_size=1):
        one = hl.zeros([height, width])
        two = hl.zeros([height, width])
        # Near enough to the mean of all for no digits to cancel.
        shift = ones[0, m.begin, 0]
        for s, c in hl.tile([splits, K], block_size=[height, width]):
            value = ones[s, m.begin, c]
            square = twos[s, m.begin, c]
            if eps is None:
                if weight is not None:
                    scale = hl.load(weight, [m.begin % G * K + c.index], c.index < K).float()[None, :]
                    value = value * scale
                    square = square * scale
            else:
                count = torch.clamp(P - s.index * length, max=length).float()[:, None]
                away = torch.where((s.index < splits)[:, None] & (c.index < K)[None, :], value - shift, 0.0)
                value = away * count
                square = square + away * value
            one = one + value
            two = two + square
        first = one.sum(dim=0).sum(dim=0, keepdim=True) / K / P
        second = two.sum(dim=0).sum(dim=0, keepdim=True) / K / P
        if eps is None:
            mean[m] = first
            rstd[m] = second
        else:
            mean[m] = first + shift
            rstd[m] = torch.rsqrt(second - first * first + eps)


@kernel(lambda ones, *_: {"block_sizes": [32, min(next_power_of_2(ones.size(0)), 64)], "num_warps": 8})
def group_norm_columns_kernel(ones: Tensor, twos: Tensor, grad_weight: Opt, grad_bias: Opt) -> None:
    for cols in hl.tile(ones.size(1)):
        one = hl.zeros([cols])
        two = hl.zeros([cols])
        for rows in hl.tile(ones.size(0)):
            one = one + ones[rows, cols].sum(dim=0)
            two = two + twos[rows, cols].sum(dim=0)
        if grad_bias is not None:
            grad_bias[cols] = one.to(grad_bias.dtype)
        if grad_weight is not None:
            grad_weight[cols] = two.to(grad_weight.dtype)

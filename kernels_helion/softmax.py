"""Softmax: a row stays on the chip where it fits, and is read twice, the second time backwards, where it does not."""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference.softmax import op

from ._kernel import kernel, next_power_of_2, row_config
from ._online import finite, online_step, scaled

LONG = 65536
"""With more bytes, a row does not stay on the chip."""
THREADS = 1024
"""They work on a long row, and read 16 bytes each at once."""


def whole_config(x: Tensor, *_: Any) -> dict[str, Any]:
    where, row = gpu(x.get_device()), next_power_of_2(x.size(1)) * x.itemsize
    config = row_config(x, most=32768)
    config["num_warps"] = min(config["num_warps"], 16)
    if 32768 < row and 2 * row < where.shared and x.size(0) > 2 * where.processors:
        # There is room for one program, which reads the next row while it works on this one.
        config |= {"pid_type": "persistent_interleaved", "range_num_stages": [3]}
    return config


def long_config(x: Tensor, *_: Any) -> dict[str, Any]:
    return {"block_sizes": [1], "num_warps": gpu(x.get_device()).warps}


@kernel(whole_config)
def softmax_whole(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        block = x[rows, :].float()
        block = block - block.amax(dim=1, keepdim=True)
        # The fast one rounds its argument, which float32 would show.
        e = torch.exp(block) if x.dtype == torch.float32 else torch.exp2(scaled(block))
        out[rows, :] = (e / e.sum(dim=1, keepdim=True)).to(out.dtype)
    return out


@kernel(long_config)
def softmax_long(x: Tensor, lanes: int) -> Tensor:
    m, n = x.size()
    out = torch.empty_like(x)
    lanes = hl.specialize(lanes)
    for rows in hl.tile(m):
        highest = hl.full([rows, lanes], float("-inf"), dtype=torch.float32)
        total = hl.zeros([rows, lanes])
        for cols in hl.tile(n, block_size=4 * lanes):
            block = hl.load(x, [rows, cols], eviction_policy="evict_last").float()
            block = torch.where((cols.index < n)[None, :], block, float("-inf")).view(rows.block_size, 4, lanes)
            highest, total = online_step(highest, total, block)
        shift = finite(torch.amax(highest, dim=1))
        row_total = (total * torch.exp2(highest - shift[:, None])).sum(dim=1)
        # The difference is 0, but of a row with +inf it is NaN.
        scale = 1.0 / (row_total + (row_total - row_total))
        for cols in hl.tile(n, block_size=4 * lanes):
            # What was read last is still in the cache.
            at = (n - 1) // (4 * lanes) * (4 * lanes) - cols.begin + hl.arange(4 * lanes)
            block = hl.load(x, [rows, at], at < n, eviction_policy="evict_first").float()
            value = torch.exp2(scaled(block) - shift[:, None]) * scale[:, None]
            hl.store(out, [rows, at], value.to(out.dtype), at < n)
    return out


@kernel(lambda grad_out, out, again: row_config(out, most=32768))
def softmax_bwd_whole(grad_out: Tensor, out: Tensor, again: bool | None) -> Tensor:
    grad_x = torch.empty_like(out)
    for rows in hl.tile(out.size(0)):
        y = out[rows, :].float()
        if again is None:
            g = grad_out[rows, :].float()
            dot = (g * y).sum(dim=-1, keepdim=True)
        else:
            # There are not registers enough for both, but the L1 cache has them.
            dot = (hl.load(grad_out, [rows, slice(None)], eviction_policy="evict_last").float() * y).sum(dim=-1, keepdim=True)
            g = hl.load(grad_out, [rows, slice(None)], eviction_policy="evict_first").float()
        grad_x[rows, :] = (y * (g - dot)).to(grad_x.dtype)
    return grad_x


@kernel(long_config)
def softmax_bwd_long(grad_out: Tensor, out: Tensor, lanes: int) -> Tensor:
    m, n = out.size()
    grad_x = torch.empty_like(out)
    lanes = hl.specialize(lanes)
    for rows in hl.tile(m):
        dot = hl.zeros([rows, lanes])
        for cols in hl.tile(n, block_size=2 * lanes):
            g = hl.load(grad_out, [rows, cols], eviction_policy="evict_last").float()
            y = hl.load(out, [rows, cols], eviction_policy="evict_last").float()
            dot = dot + (g * y).view(rows.block_size, 2, lanes).sum(dim=1)
        row_dot = dot.sum(dim=1)
        for cols in hl.tile(n, block_size=2 * lanes):
            at = (n - 1) // (2 * lanes) * (2 * lanes) - cols.begin + hl.arange(2 * lanes)
            g = hl.load(grad_out, [rows, at], at < n, eviction_policy="evict_first").float()
            y = hl.load(out, [rows, at], at < n, eviction_policy="evict_first").float()
            hl.store(grad_x, [rows, at], (y * (g - row_dot[:, None])).to(grad_x.dtype), at < n)
    return grad_x


def softmax_fwd(x: Tensor) -> Tensor:
    if x.size(1) * x.itemsize <= LONG:
        return softmax_whole(x)
    return softmax_long(x, THREADS * 16 // x.itemsize)


def softmax_bwd(grad_out: Tensor, out: Tensor) -> Tensor:
    if out.size(1) * out.itemsize <= LONG:
        return softmax_bwd_whole(grad_out, out, out.size(1) > 16384 or None)
    return softmax_bwd_long(grad_out, out, THREADS * 16 // out.itemsize)


softmax = op.implement(softmax_fwd, softmax_bwd)

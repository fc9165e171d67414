"""Softmax and its logarithm: a row stays on the chip where it fits, and is read twice, the second time backwards, where not.

The kernels take `log` as None or True, for Helion builds None into the code.
"""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu

from ._kernel import Kernel, kernel, next_power_of_2, row_config
from ._online import finite, online_step, scaled

LONG = 65536
"""With more bytes, a row does not stay on the chip."""
THREADS = 1024
"""They work on a long row, and read 16 bytes each at once, if rows are a multiple of that."""


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


def bwd_config(x: Tensor, *_: Any) -> dict[str, Any]:
    return row_config(x, most=32768)


def exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    # The fast one rounds its argument, which float32 would show.
    return torch.exp(x) if dtype == torch.float32 else torch.exp2(scaled(x))


def gradient(g: Tensor, y: Tensor, dot: Tensor, dtype: torch.dtype, log: bool | None) -> Tensor:
    return (y * (g - dot) if log is None else g - exp(y, dtype) * dot).to(dtype)


def softmax_whole(x: Tensor, log: bool | None) -> Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        block = x[rows, :].float()
        block = block - block.amax(dim=1, keepdim=True)
        e = exp(block, x.dtype)
        total = e.sum(dim=1, keepdim=True)
        out[rows, :] = (e / total if log is None else block - torch.log(total)).to(out.dtype)
    return out


def softmax_long(x: Tensor, lanes: int, log: bool | None) -> Tensor:
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
        row_total = row_total + (row_total - row_total)
        scale = 1.0 / row_total
        # Exponents are of differences to `shift`, which is this times log2(e) but for a rounding, large where logits are.
        natural = shift / scaled(1.0)
        row_log = torch.log(row_total) + (shift - scaled(natural)) / scaled(1.0)
        for cols in hl.tile(n, block_size=4 * lanes):
            # What was read last is still in the cache.
            at = (n - 1) // (4 * lanes) * (4 * lanes) - cols.begin + hl.arange(4 * lanes)
            block = hl.load(x, [rows, at], at < n, eviction_policy="evict_first").float()
            if log is None:
                value = torch.exp2(scaled(block) - shift[:, None]) * scale[:, None]
            else:
                value = block - natural[:, None] - row_log[:, None]
            hl.store(out, [rows, at], value.to(out.dtype), at < n)
    return out


def softmax_bwd_whole(grad_out: Tensor, out: Tensor, again: bool | None, log: bool | None) -> Tensor:
    grad_x = torch.empty_like(out)
    for rows in hl.tile(out.size(0)):
        y = out[rows, :].float()
        if again is None:
            g = grad_out[rows, :].float()
            dot = (g * y if log is None else g).sum(dim=-1, keepdim=True)
        else:
            # There are not registers enough for both, but the L1 cache has them.
            g = hl.load(grad_out, [rows, slice(None)], eviction_policy="evict_last").float()
            dot = (g * y if log is None else g).sum(dim=-1, keepdim=True)
            g = hl.load(grad_out, [rows, slice(None)], eviction_policy="evict_first").float()
        grad_x[rows, :] = gradient(g, y, dot, grad_x.dtype, log)
    return grad_x


def softmax_bwd_long(grad_out: Tensor, out: Tensor, lanes: int, log: bool | None) -> Tensor:
    m, n = out.size()
    grad_x = torch.empty_like(out)
    lanes = hl.specialize(lanes)
    for rows in hl.tile(m):
        dot = hl.zeros([rows, lanes])
        for cols in hl.tile(n, block_size=2 * lanes):
            g = hl.load(grad_out, [rows, cols], eviction_policy="evict_last").float()
            if log is None:
                g = g * hl.load(out, [rows, cols], eviction_policy="evict_last").float()
            dot = dot + g.view(rows.block_size, 2, lanes).sum(dim=1)
        row_dot = dot.sum(dim=1)
        for cols in hl.tile(n, block_size=2 * lanes):
            at = (n - 1) // (2 * lanes) * (2 * lanes) - cols.begin + hl.arange(2 * lanes)
            g = hl.load(grad_out, [rows, at], at < n, eviction_policy="evict_first").float()
            y = hl.load(out, [rows, at], at < n, eviction_policy="evict_first").float()
            hl.store(grad_x, [rows, at], gradient(g, y, row_dot[:, None], grad_x.dtype, log), at < n)
    return grad_x


def kernels(op: str) -> tuple[Kernel[..., Tensor], ...]:
    """The four above, with configurations of an op's own."""
    return (
        kernel(whole_config, name=f"{op}_whole")(softmax_whole),
        kernel(long_config, name=f"{op}_long")(softmax_long),
        kernel(bwd_config, name=f"{op}_bwd_whole")(softmax_bwd_whole),
        kernel(long_config, name=f"{op}_bwd_long")(softmax_bwd_long),
    )


def lanes_of(x: Tensor) -> int:
    # Elements that are read one by one have an address each in registers.
    return THREADS * (2 if x.size(1) % 16 else 16 // x.itemsize)


def forward(whole: Kernel[..., Tensor], long: Kernel[..., Tensor], x: Tensor, log: bool | None) -> Tensor:
    if x.size(1) * x.itemsize <= LONG:
        return whole(x, log)
    return long(x, lanes_of(x), log)


def backward(whole: Kernel[..., Tensor], long: Kernel[..., Tensor], grad_out: Tensor, out: Tensor, log: bool | None) -> Tensor:
    if out.size(1) * out.itemsize <= LONG:
        return whole(grad_out, out, out.size(1) > 16384 or None, log)
    return long(grad_out, out, lanes_of(out), log)

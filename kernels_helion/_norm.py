"""Normalisation of rows, centred or not, of a tensor or of a sum: kernels and host functions of four ops.

A row stays on the chip where it fits. Backward, a program for each processor has a run of rows, and one float32 sum of what
they add to the gradients of weight and bias.
"""

from collections.abc import Sequence
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference._norm import backward_tile, forward_tile

from ._kernel import Config, kernel, next_power_of_2, row_config, rows_and_columns

Opt = Tensor | None
FEW = 1 << 20
"""Up to as many elements, a launch costs more than reading them again."""


def fwd_sizes(x: Tensor, residual: Opt, total: Opt, weight: Opt, bias: Opt, out: Tensor, mean: Opt, *_: Any) -> dict[str, int]:
    return {**rows_and_columns(x), "centred": mean is not None, "added": residual is not None}


def bwd_sizes(grad_out: Tensor, grad_total: Opt, x: Tensor, weight: Opt, mean: Opt, *_: Any) -> dict[str, int]:
    return {**rows_and_columns(grad_out), "centred": mean is not None, "added": grad_total is not None}


def widest(N: int) -> int:
    """Of rows that stay on the chip. Those that do not begin at a multiple of 16 bytes are read by the element."""
    return 8192 if N % 8 == 0 else 4096


def bwd_config(grad_out: Tensor, grad_total: Opt, x: Tensor, weight: Opt, mean: Opt, *_: Any) -> Config:
    width = next_power_of_2(x.size(1)) if x.size(1) <= widest(x.size(1)) else 4096
    where = gpu(x.get_device())
    few = mean is not None and x.size(1) <= 4096 and x.size(1) % 8 == 0
    tile, lanes, most_stages = backward_tile(width, few=few, added=grad_total is not None)
    step = min(max(tile // width, 1), next_power_of_2(-(-x.size(0) // where.processors)))
    # As many steps ahead as half of the shared memory holds, of two tensors or three.
    tensors = 2 + (grad_total is not None)
    stages = min(1 + where.shared // (2 * tensors * step * width * x.itemsize), most_stages)
    warps = -(-step * width * x.itemsize // (2 * lanes))
    return {"block_sizes": [step, width], "range_num_stages": [0, stages], "num_warps": min(warps, 16)}


def few_config(grad_out: Tensor, grad_total: Opt, x: Tensor, *_: Any) -> Config:
    rows, height = row_config(x), min(next_power_of_2(x.size(0)), 128)
    return {**rows, "block_sizes": [*rows["block_sizes"], 32, height], "num_warps": max(rows["num_warps"], 4)}


def fwd_config(x: Tensor, residual: Opt, total: Opt, weight: Opt, bias: Opt, out: Tensor, mean: Opt, *_: Any) -> Config:
    config = row_config(x, most=65536 // x.itemsize, looped=8192)
    if mean is not None and x.size(1) <= 8192:
        rows, warps = forward_tile(next_power_of_2(x.size(1)), *config["block_sizes"])
        config |= {"block_sizes": [rows], "num_warps": warps}
    return config


@kernel(fwd_config, fwd_sizes)
def norm_fwd_kernel(
    x: Tensor, residual: Opt, total: Any, weight: Opt, bias: Opt, out: Tensor, mean: Opt, rstd: Tensor, eps: float,
    offset: float, normed_dtype: torch.dtype, early: bool | None,
) -> None:  # fmt: skip
    for rows in hl.tile(x.size(0)):
        wide = x[rows, :].float()
        if early is not None:
            # It is there when it is needed; wider rows would be short of registers, and so of programs.
            scale = weight[:]  # type: ignore[index]
        if residual is not None:
            rounded = (wide + residual[rows, :].float()).to(total.dtype)
            total[rows, :] = rounded
            wide = rounded.float()
        if mean is not None:
            average = wide.mean(dim=-1)
            mean[rows] = average
            wide = wide - average[:, None]
        inverse = torch.rsqrt((wide * wide).mean(dim=-1) + eps)
        rstd[rows] = inverse
        normed = (wide * inverse[:, None]).to(normed_dtype).float()
        if weight is not None:
            if early is None:
                scale = weight[:]
            normed = normed * (scale.float() + offset)[None, :]  # type: ignore[possibly-unbound]
        if bias is not None:
            normed = normed + bias[:].float()[None, :]
        out[rows, :] = normed.to(out.dtype)


@kernel(bwd_config, bwd_sizes)
def norm_bwd_kernel(
    grad_out, grad_total, x, weight, mean, rstd, dots, averages, new_dots, new_averages, grad_x, also, sums, bias_sums,
    offset: float, run: int, writes: hl.constexpr,
):  # fmt: skip
    m, n = x.size()
    step = hl.register_block_size(m)
    for part, cols in hl.tile([-(-m // run), n], block_size=[1, None]):
        on_weight = hl.zeros([step, cols])
        on_bias = hl.zeros([step, cols])
        if weight is not None:
            scale = (weight[cols].float() + offset)[None, :]
        for rows in hl.tile(part.begin * run, min(part.begin * run + run, m), block_size=step):
            grad = grad_out[rows, cols].float()
            inverse = rstd[rows][:, None]
            value = x[rows, cols].float()
            if mean is not None:
                value = value - mean[rows][:, None]
            normed = value * inverse
            on_weight = on_weight + grad * normed
            if bias_sums is not None:
                on_bias = on_bias + grad
            if weight is not None:
                grad = grad * scale  # type: ignore
            dot = (grad * normed).sum(dim=1) / n
            if writes == "dots":
                new_dots[cols.id, rows] = dot
                if mean is not None:
                    new_averages[cols.id, rows] = grad.sum(dim=1) / n
            if writes == "grad_x":
                if dots is not None:
                    dot = dots[:, rows].sum(dim=0)
                change = normed * dot[:, None]
                if mean is not None:
                    if averages is not None:
                        change = change + averages[:, rows].sum(dim=0)[:, None]
                    else:
                        change = change + (grad.sum(dim=1) / n)[:, None]
                result = (grad - change) * inverse
                if grad_total is not None:
                    result = result + grad_total[rows, cols].float()
                grad_x[rows, cols] = result.to(grad_x.dtype)
                if also is not None:
                    also[rows, cols] = result.to(also.dtype)
        if sums is not None:
            sums[part, cols] = on_weight.sum(dim=0)[None, :]
        if bias_sums is not None:
            bias_sums[part, cols] = on_bias.sum(dim=0)[None, :]


@kernel(few_config, bwd_sizes)
def norm_bwd_few_kernel(
    grad_out, grad_total, x, weight, mean, rstd, grad_x, also, grad_weight, grad_bias, offset: float
) -> None:
    """Some programs have rows of grad_x, others columns of grad_weight: one launch, which reads all twice."""
    for rows in hl.tile(x.size(0)):
        inverse = rstd[rows][:, None]
        value = x[rows, :].float()
        if mean is not None:
            value = value - mean[rows][:, None]
        normed = value * inverse
        grad = grad_out[rows, :].float() * (weight[:].float() + offset)[None, :]
        change = normed * (grad * normed).mean(dim=1)[:, None]
        if mean is not None:
            change = change + grad.mean(dim=1)[:, None]
        result = inverse * (grad - change)
        if grad_total is not None:
            result = result + grad_total[rows, :].float()
        grad_x[rows, :] = result.to(grad_x.dtype)
        if also is not None:
            also[rows, :] = result.to(also.dtype)
    for cols in hl.tile(x.size(1)):
        on_weight = hl.zeros([cols])
        on_bias = hl.zeros([cols])
        # Not `x[:, cols]`: Helion takes two whole dimensions for one where their sizes are equal.
        for some in hl.tile(x.size(0)):
            column = x[some, cols].float()
            if mean is not None:
                column = column - mean[some][:, None]
            given = grad_out[some, cols].float()
            on_weight = on_weight + (given * column * rstd[some][:, None]).sum(dim=0)
            if grad_bias is not None:
                on_bias = on_bias + given.sum(dim=0)
        grad_weight[cols] = on_weight.to(grad_weight.dtype)
        if grad_bias is not None:
            grad_bias[cols] = on_bias.to(grad_bias.dtype)


@kernel(lambda sums, *_: {"block_sizes": [32], "num_warps": 8})
def norm_sum_kernel(sums, bias_sums, grad_weight, grad_bias) -> None:
    for cols in hl.tile(grad_weight.size(0)):
        grad_weight[cols] = sums[:, cols].sum(dim=0).to(grad_weight.dtype)
        if grad_bias is not None:
            grad_bias[cols] = bias_sums[:, cols].sum(dim=0).to(grad_bias.dtype)


def norm_fwd(
    x: Tensor, weight: Opt, bias: Opt, eps: float, offset: float, out: Tensor, *, centred: bool,
    normed_dtype: torch.dtype = torch.float32, residual: Opt = None, total: Opt = None,
) -> tuple[Opt, Tensor]:  # fmt: skip
    """Writes to `out` and `total`; the mean, if rows are centred, and the reciprocal standard deviation."""
    rstd = x.new_empty(x.size(0), dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    early = (weight is not None and x.size(1) <= 4096) or None
    norm_fwd_kernel(x, residual, total, weight, bias, out, mean, rstd, eps, offset, normed_dtype, early)
    return mean, rstd


def norm_bwd(
    grad_out: Tensor, grad_total: Opt, x: Tensor, weight: Opt, bias: Opt, mean: Opt, rstd: Tensor, offset: float,
    needs: Sequence[bool], also: Opt = None,
) -> tuple[Opt, Opt, Opt]:  # fmt: skip
    """The gradients of what was normalised, weight and bias, where needed; the first is written to `also`, too."""
    M, N = x.shape
    inputs = grad_out, grad_total, x, weight, mean, rstd
    if weight is not None and M * N <= FEW and M <= 1024 and N <= widest(N):
        grads = torch.empty_like(x), torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        norm_bwd_few_kernel(*inputs, grads[0], also, *grads[1:], offset)
        return tuple([g if need else None for g, need in zip(grads, needs, strict=True)])  # type: ignore[return-value]
    step, width = norm_bwd_kernel.config(*inputs)["block_sizes"]
    blocks = -(-N // width)
    # A program for each processor; each has a run of rows.
    run = -(-M * blocks // (step * gpu(x.get_device()).processors)) * step
    grad_x, grad_weight, grad_bias = (
        torch.empty_like(t) if t is not None and need else None for t, need in zip((x, weight, bias), needs, strict=True)
    )
    sums, bias_sums = (None if g is None else rstd.new_empty(-(-M // run), N) for g in (grad_weight, grad_bias))
    dots = rstd.new_empty(blocks, M) if grad_x is not None and blocks > 1 else None
    averages = None if dots is None or mean is None else torch.empty_like(dots)
    if dots is not None:
        writes = hl.constexpr("dots")
        norm_bwd_kernel(*inputs, None, None, dots, averages, None, None, None, None, offset, run, writes)
    writes = hl.constexpr("" if grad_x is None else "grad_x")
    norm_bwd_kernel(*inputs, dots, averages, None, None, grad_x, also, sums, bias_sums, offset, run, writes)
    if sums is not None:
        norm_sum_kernel(sums, bias_sums, grad_weight, grad_bias)
    elif bias_sums is not None:
        norm_sum_kernel(bias_sums, None, grad_bias, None)
    return grad_x, grad_weight, grad_bias


def add_norm_bwd(
    grad_out: Tensor, grad_total: Tensor, total: Tensor, weight: Opt, bias: Opt, mean: Opt, rstd: Tensor, offset: float,
    needs: Sequence[bool],
) -> tuple[Opt, Opt, Opt, Opt]:  # fmt: skip
    """The gradients of both terms of the sum, weight and bias, where needed."""
    needs_x, needs_residual, *needs_rest = needs
    grad_x = torch.empty_like(grad_out) if needs_x else None
    grad_residual, grad_weight, grad_bias = norm_bwd(
        grad_out, grad_total, total, weight, bias, mean, rstd, offset, (needs_x or needs_residual, *needs_rest), also=grad_x
    )
    return grad_x, grad_residual if needs_residual else None, grad_weight, grad_bias

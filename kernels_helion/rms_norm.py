"""RMS norm: a row stays on the chip where it fits; runs of rows share one float32 sum of the weight's gradient."""

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference.rms_norm import Casting, Opt, empty_out, op

from ._kernel import Config, kernel, next_power_of_2, row_config

FEW = 1 << 20
"""Up to as many elements, a launch costs more than reading them again."""


def tile_config(grad: Tensor, x: Tensor, *_: object) -> Config:
    # Rows that do not begin at a multiple of 16 bytes are read by the element, which takes more registers.
    width = next_power_of_2(x.size(1)) if x.size(1) <= (8192 if x.size(1) % 8 == 0 else 4096) else 4096
    where = gpu(x.get_device())
    step = min(max(4096 // width, 1), next_power_of_2(-(-x.size(0) // where.processors)))
    # As many steps ahead as half of the shared memory holds, of two tensors.
    stages = min(1 + where.shared // (4 * step * width * grad.itemsize), 4)
    return {"block_sizes": [step, width], "range_num_stages": [0, stages], "num_warps": -(-step * width // 512)}


@kernel(lambda x, *_: row_config(x, most=65536 // x.itemsize, looped=8192))
def rms_norm_fwd_kernel(
    x: Tensor, weight: Opt, out: Tensor, rstd: Tensor, eps: float, offset: float, normed_dtype: torch.dtype
) -> None:
    for rows in hl.tile(x.size(0)):
        wide = x[rows, :].float()
        inverse = torch.rsqrt((wide * wide).mean(dim=-1) + eps)
        rstd[rows] = inverse
        normed = (wide * inverse[:, None]).to(normed_dtype).float()
        if weight is not None:
            normed = normed * (weight[:].float() + offset)[None, :]
        out[rows, :] = normed.to(out.dtype)


@kernel(tile_config)
def rms_norm_bwd_kernel(grad_out, x, weight, rstd, dots, new_dots, grad_x, sums, offset, run, writes: hl.constexpr):
    m, n = x.size()
    step = hl.register_block_size(m)
    for part, cols in hl.tile([-(-m // run), n], block_size=[1, None]):
        total = hl.zeros([step, cols])
        scale = (weight[cols].float() + offset)[None, :]
        for rows in hl.tile(part.begin * run, min(part.begin * run + run, m), block_size=step):
            grad = grad_out[rows, cols].float()
            inverse = rstd[rows][:, None]
            normed = x[rows, cols].float() * inverse
            total = total + grad * normed
            grad = grad * scale
            mean = (grad * normed).sum(dim=1) / n
            if writes == "dots":
                new_dots[cols.id, rows] = mean
            if dots is not None:
                mean = dots[:, rows].sum(dim=0)
            if writes == "grad_x":
                grad_x[rows, cols] = (inverse * (grad - normed * mean[:, None])).to(grad_x.dtype)
        if sums is not None:
            sums[part, cols] = total.sum(dim=0)[None, :]


def few_config(grad_out: Tensor, x: Tensor, *_: object) -> Config:
    M, rows = x.size(0), row_config(x)
    loops = [*rows["reduction_loops"], 128 if M > 128 else None]
    return {"block_sizes": [*rows["block_sizes"], 32], "reduction_loops": loops, "num_warps": max(rows["num_warps"], 4)}


@kernel(few_config)
def rms_norm_bwd_few_kernel(grad_out, x, weight, rstd, grad_x, grad_weight, offset: float) -> None:
    """Some programs have rows of grad_x, others columns of grad_weight: one launch, which reads all twice."""
    for rows in hl.tile(x.size(0)):
        inverse = rstd[rows][:, None]
        normed = x[rows, :].float() * inverse
        grad = grad_out[rows, :].float() * (weight[:].float() + offset)[None, :]
        mean = (grad * normed).mean(dim=1)
        grad_x[rows, :] = (inverse * (grad - normed * mean[:, None])).to(grad_x.dtype)
    for cols in hl.tile(x.size(1)):
        products = grad_out[:, cols].float() * x[:, cols].float() * rstd[:][:, None]
        grad_weight[cols] = products.sum(dim=0).to(grad_weight.dtype)


@kernel(lambda sums, out: {"block_sizes": [32], "num_warps": 8})
def sum_parts(sums: Tensor, out: Tensor) -> None:
    for cols in hl.tile(out.size(0)):
        out[cols] = sums[:, cols].sum(dim=0).to(out.dtype)


def rms_norm_fwd(x: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> tuple[Tensor, Tensor]:
    out, rstd = empty_out(x, weight, eps, offset, casting), x.new_empty(x.shape[0], dtype=torch.float32)
    eps = torch.finfo(x.dtype).eps if eps is None else float(eps)
    rms_norm_fwd_kernel(x, weight, out, rstd, eps, float(offset), x.dtype if casting == "llama" else torch.float32)
    return out, rstd


def rms_norm_bwd(grad_out: Tensor, x: Tensor, weight: Opt, rstd: Tensor, offset: float, needs: list[bool]) -> tuple[Opt, Opt]:
    M, N = x.shape
    if weight is not None and M * N <= FEW and M <= 1024 and N <= 4096:
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        rms_norm_bwd_few_kernel(grad_out, x, weight, rstd, grad_x, grad_weight, float(offset))
        return grad_x if needs[0] else None, grad_weight if needs[1] else None
    step, width = rms_norm_bwd_kernel.config(grad_out, x)["block_sizes"]
    blocks = -(-N // width)
    # A program for each processor; each has a run of rows.
    run = -(-M * blocks // (step * gpu(x.get_device()).processors)) * step
    grad_x = torch.empty_like(x) if needs[0] else None
    sums = rstd.new_empty(-(-M // run), N) if needs[1] else None
    dots = rstd.new_empty(blocks, M) if needs[0] and blocks > 1 else None
    scale, offset = (rstd.new_ones(1).expand(N), 0.0) if weight is None else (weight, float(offset))
    if dots is not None:
        rms_norm_bwd_kernel(grad_out, x, scale, rstd, None, dots, None, None, offset, run, hl.constexpr("dots"))
    writes = hl.constexpr("grad_x" if needs[0] else "")
    rms_norm_bwd_kernel(grad_out, x, scale, rstd, dots, None, grad_x, sums, offset, run, writes)
    if sums is None:
        return grad_x, None
    grad_weight = torch.empty_like(scale)
    sum_parts(sums, grad_weight)
    return grad_x, grad_weight


rms_norm = op.implement(rms_norm_fwd, rms_norm_bwd)

"""A linear layer and cross entropy: the kernels of cross entropy, on parts of the logits that cuBLAS makes."""

import math

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference._linear_cross_entropy import Backend, host
from kernels_reference.linear_cross_entropy import op

from ._kernel import kernel
from .cross_entropy import cross_entropy_fwd, write_grad


@kernel(lambda *_: {"block_sizes": [4096], "num_warps": 8}, lambda x, *_: {"N": x.size(0), "itemsize": x.itemsize})
def scale_kernel(x: Tensor, factor: Tensor, out: Tensor, run: int, unit: float) -> None:
    for part in hl.tile(-(-x.size(0) // run), block_size=1):
        by = factor[0]
        stop = torch.where(by == unit, part.begin * run, min(part.begin * run + run, x.size(0)))
        for i in hl.tile(part.begin * run, stop):
            out[i] = (x[i].float() * by).to(out.dtype)


def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    n = x.numel()
    run = -(-n // (8 * gpu(x.get_device()).processors * 4096)) * 4096
    flat, flat_out = (t.as_strided((n,), (1,)) for t in (x, out))
    # In place there is nothing to do for 1; nothing is equal to NaN.
    scale_kernel(flat, factor.view(1), flat_out, run, 1.0 if out is x else math.nan)


linear_cross_entropy = op.implement(*host(Backend(cross_entropy_fwd, write_grad, scale)), module=__name__)

"""A linear layer and cross entropy: the kernels of cross entropy, on parts of the logits that cuBLAS makes."""

import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference._linear_cross_entropy import Backend, host
from kernels_reference.linear_cross_entropy import op

from ._launch import launch
from .cross_entropy import cross_entropy_fwd, write_grad


@triton.jit
def scale_kernel(x_ptr, factor_ptr, out_ptr, N, IN_PLACE: tl.constexpr, BLOCK_N: tl.constexpr):
    factor = tl.load(factor_ptr)
    end = N
    if IN_PLACE:
        end = tl.where(factor == 1.0, 0, N)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK_N, end, tl.num_programs(0) * BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + cols, cols < N).to(tl.float32)
        tl.store(out_ptr + cols, x * factor, cols < N)


def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    programs = min(triton.cdiv(x.numel(), 4096), 8 * gpu(x.get_device()).processors)
    launch(scale_kernel, (programs,), x, factor, out, x.numel(), out is x, 4096, num_warps=8)


linear_cross_entropy = op.implement(*host(Backend(cross_entropy_fwd, write_grad, scale)), module=__name__)

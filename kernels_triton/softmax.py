"""Softmax, by the kernels that it shares with its logarithm."""

from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference.softmax import op

from ._launch import configured
from ._softmax import FWD_SPACE, SPACE, backward, bwd_config, forward, fwd_config


@configured(**FWD_SPACE)
def softmax_fwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    return fwd_config(where, M, N, itemsize)


@configured(**SPACE)
def softmax_bwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    return bwd_config(where, M, N, itemsize)


def softmax_fwd(x: Tensor) -> Tensor:
    return forward(softmax_fwd_config, x, log=False)


def softmax_bwd(grad_out: Tensor, out: Tensor) -> Tensor:
    return backward(softmax_bwd_config, grad_out, out, log=False)


softmax = op.implement(softmax_fwd, softmax_bwd)

"""Log softmax, by softmax's kernels."""

from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference.log_softmax import op

from ._launch import configured
from ._softmax import FWD_SPACE, SPACE, backward, bwd_config, forward, fwd_config


@configured(**FWD_SPACE)
def log_softmax_fwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    return fwd_config(where, M, N, itemsize)


@configured(**SPACE)
def log_softmax_bwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    return bwd_config(where, M, N, itemsize)


def log_softmax_fwd(x: Tensor) -> Tensor:
    return forward(log_softmax_fwd_config, x, log=True)


def log_softmax_bwd(grad_out: Tensor, out: Tensor) -> Tensor:
    return backward(log_softmax_bwd_config, grad_out, out, log=True)


log_softmax = op.implement(log_softmax_fwd, log_softmax_bwd)

"""Log softmax, by softmax's kernels."""

from torch import Tensor

from kernels_reference.log_softmax import op

from ._softmax import backward, forward, kernels

log_softmax_whole, log_softmax_long, log_softmax_bwd_whole, log_softmax_bwd_long = kernels("log_softmax")


def log_softmax_fwd(x: Tensor) -> Tensor:
    return forward(log_softmax_whole, log_softmax_long, x, log=True)


def log_softmax_bwd(grad_out: Tensor, out: Tensor) -> Tensor:
    return backward(log_softmax_bwd_whole, log_softmax_bwd_long, grad_out, out, log=True)


log_softmax = op.implement(log_softmax_fwd, log_softmax_bwd)

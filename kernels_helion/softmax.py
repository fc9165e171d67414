"""Softmax, by the kernels that it shares with its logarithm."""

from torch import Tensor

from kernels_reference.softmax import op

from ._softmax import backward, forward, kernels

softmax_whole, softmax_long, softmax_bwd_whole, softmax_bwd_long = kernels("softmax")


def softmax_fwd(x: Tensor) -> Tensor:
    return forward(softmax_whole, softmax_long, x, log=None)


def softmax_bwd(grad_out: Tensor, out: Tensor) -> Tensor:
    return backward(softmax_bwd_whole, softmax_bwd_long, grad_out, out, log=None)


softmax = op.implement(softmax_fwd, softmax_bwd)

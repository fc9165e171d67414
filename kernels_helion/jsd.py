"""Generalised Jensen-Shannon divergence, by the kernels that it shares with Kullback and Leibler's."""

import torch
from torch import Tensor

from kernels_reference._divergence import Maybe, divisor
from kernels_reference.jsd import op, ordered

from ._divergence import backward, forward, kernels

KERNELS = jsd_kernel, jsd_reduce_kernel, jsd_bwd_kernel = kernels("jsd")


def jsd_fwd(
    input: Tensor, target: Tensor, labels: Maybe, beta: float, reduction: str, temperature: float | None, ignore_index: int,
    dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    x, y, share = ordered(input, target, beta)
    divide = divisor(input, labels, reduction, input.size(0))
    options = ignore_index, temperature, share, False, reduction, divide, dtype or input.dtype
    return forward(KERNELS, x, y, labels, *options)


def jsd_bwd(
    grad_out: Tensor, input: Tensor, target: Tensor, labels: Maybe, logs: Tensor, sums: Tensor, total: Tensor, beta: float,
    temperature: float | None, ignore_index: int, needs: tuple[bool, bool],
) -> tuple[Maybe, Maybe]:  # fmt: skip
    x, y, share = ordered(input, target, beta)
    first, second, _ = ordered(*needs, beta)
    options = logs, sums, total, ignore_index, temperature, share, False, (first, second)
    grads = backward(KERNELS, grad_out, x, y, labels, *options)
    return ordered(*grads, beta)[:2]


jsd = op.implement(jsd_fwd, jsd_bwd)

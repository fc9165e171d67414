"""Kullback-Leibler divergence, by the kernels that it shares with Jensen-Shannon's."""

from functools import partial

import torch
from torch import Tensor

from kernels_reference._divergence import Maybe, divisor, in_rows
from kernels_reference.kl_div import op

from ._divergence import backward, forward, kernels

KERNELS = kl_div_kernel, kl_div_reduce_kernel, kl_div_bwd_kernel = kernels("kl_div")


def kl_div_fwd(
    input: Tensor, target: Tensor, labels: Maybe, reduction: str, log_target: bool, temperature: float | None,
    ignore_index: int, dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    run = partial(
        forward, KERNELS, ignore_index=ignore_index, temperature=temperature, beta=None,
        probabilities=temperature is None and not log_target, reduction=reduction,
        divide=divisor(input, labels, reduction, input.size(0)), dtype=dtype or input.dtype,
    )  # fmt: skip
    return in_rows(("input", "target", "labels"), (input, target, labels), ("out",), run)


def kl_div_bwd(
    grad_out: Tensor, input: Tensor, target: Tensor, labels: Maybe, logs: Tensor, sums: Tensor, total: Tensor,
    log_target: bool, temperature: float | None, ignore_index: int, needs: tuple[bool, bool],
) -> tuple[Maybe, Maybe]:  # fmt: skip
    run = partial(
        backward, KERNELS, logs=logs, sums=sums, total=total, ignore_index=ignore_index,
        temperature=temperature, beta=None, probabilities=temperature is None and not log_target, needs=needs,
    )  # fmt: skip
    return in_rows(("grad_out", "input", "target", "labels"), (grad_out, input, target, labels), ("input", "target"), run)


kl_div = op.implement(kl_div_fwd, kl_div_bwd)

"""What the divergences of two distributions share: reductions over rows that count, what is refused, inputs, costs, hosts."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._arguments import FLOATS
from ._draw import Draw
from ._op import Cost
from ._rows import Rows

Maybe = Tensor | None
T = TypeVar("T")
ROWS = {"input": 1, "target": 1, "labels": 0, "out": 1}
EXTRAS: dict[str, Callable[..., Tensor]] = {
    # Of each row and both tensors: the largest logit, the logarithm of the sum of exponentials over it, and the sum of the
    # derivatives for log-probabilities.
    "logs": lambda input, *_: input.new_empty(4, prod(input.shape[:-1]), dtype=torch.float32),
    "sums": lambda input, *_: input.new_empty(2, prod(input.shape[:-1]), dtype=torch.float32),
    # What the sum is divided by.
    "total": lambda input, *_: input.new_empty(1, dtype=torch.float32),
}


def weighted(p: Tensor, difference: Tensor) -> Tensor:
    """Their product: 0, with derivatives of 0, where p is 0, whatever the difference."""
    zero = p == 0
    return torch.where(zero, 0, p) * torch.where(zero, 0, difference)


def reduced(
    terms: Tensor, labels: Maybe, ignore_index: int, reduction: str, batch: int, dtype: torch.dtype | None, default: torch.dtype
) -> Tensor:
    """`batch` is what "batchmean" divides by where all rows count."""
    counts = None if labels is None else labels != ignore_index
    if counts is not None:
        terms = torch.where(counts[..., None], terms, 0)
    if reduction != "none":
        total: Any = 1
        if reduction != "sum":
            each = terms.shape[-1] if reduction == "mean" else 1
            everything = terms.numel() if reduction == "mean" else batch
            total = everything if counts is None else counts.sum() * each
        terms = terms.sum() / total
    return terms.to(dtype or default)


def divisor(input: Tensor, labels: Maybe, reduction: str, batch: int) -> tuple[float, bool]:
    """What the sum is divided by, and whether that is for each row that counts; for kernels, of (M, V)."""
    if reduction in ("sum", "none"):
        return 1.0, False
    if labels is None:
        return float(input.numel() if reduction == "mean" else batch), False
    return float(input.shape[-1] if reduction == "mean" else 1), True


def check_pair(
    op: str, input: Tensor, target: Tensor, labels: Maybe, temperature: float | None, dtype: torch.dtype | None
) -> None:
    if input.ndim == 0 or input.shape[-1] == 0:
        raise ValueError(f"{op}: input must have one class or more, got shape {tuple(input.shape)}")
    if target.shape != input.shape:
        raise ValueError(f"{op}: target must have the shape of input, {tuple(input.shape)}, got {tuple(target.shape)}")
    if labels is not None and labels.shape != input.shape[:-1]:
        raise ValueError(f"{op}: labels must have the shape {tuple(input.shape[:-1])} of the rows, got {tuple(labels.shape)}")
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ValueError(f"{op}: temperature must be more than 0 and finite, or None, got {temperature}")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"{op}: dtype must be float32, float16, bfloat16 or None, got {dtype}")


def softened(t: Tensor, temperature: float) -> Tensor:
    """As users write it, in float32."""
    return torch.log_softmax(t if temperature == 1 else t / temperature, -1, dtype=torch.float32)


def pair(*shape: int, labels: bool = False, log: bool = True, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    """Two tensors of logits; without a temperature, log-probabilities, or a target of probabilities."""

    def make(draw: Draw) -> dict[str, Any]:
        both = [draw(*shape), draw(*shape)]
        if options.get("temperature") is None:
            both = [torch.log_softmax(t, -1) for t in both]
        arguments: dict[str, Any] = {"input": both[0], "target": both[1] if log else both[1].exp()}
        if labels:  # A third is of a prompt, say, and ignored.
            arguments |= {"labels": draw.integers(-1, 2, *shape[:-1]), "ignore_index": -1}
        return arguments | options

    return make


def cost(input: Tensor, target: Tensor, labels: Maybe = None, *rest: Any, **options: Any) -> tuple[Cost, Cost]:
    n, both = input.numel(), input.nbytes + target.nbytes + (0 if labels is None else labels.nbytes)
    out = input.nbytes if options["reduction"] == "none" else 0
    return Cost(both + out, 10 * n), Cost(2 * both + out, 14 * n)


def in_rows(names: Sequence[str], values: Sequence[Any], results: Sequence[str], run: Callable[..., Sequence[Any]]) -> Any:
    """What `run` makes of the values, which it sees with one leading dimension, as some of its results lose it again."""
    flat, shape = Rows(ROWS, names).flatten(values)
    found = list(run(*flat))
    for i, name in enumerate(results):
        found[i] = None if found[i] is None else Rows(ROWS, ()).restore(name, found[i], shape)
    return tuple(found)


def empty_out(input: Tensor, reduction: str, dtype: torch.dtype | None) -> Tensor:
    (out,) = in_rows(
        ("input",),
        (input,),
        ("out",),
        lambda x: [x.new_empty(x.shape if reduction == "none" else (), dtype=dtype or x.dtype)],
    )
    return out


def ordered(x: T, y: T, beta: float) -> tuple[T, T, float | None]:
    """What is of the student and of the teacher, changed over for `beta = 1`, and the rest of beta: None for KL of these."""
    return (y, x, None) if beta == 1 else (x, y, beta or None)


Host = tuple[Callable[..., Any], Callable[..., Any]]
"""A forward and a backward, of a package's `forward` and `backward` over rows."""


def kl_div_host(forward: Callable[..., Any], backward: Callable[..., Any]) -> Host:
    def kl_div_fwd(
        input: Tensor, target: Tensor, labels: Maybe, reduction: str, log_target: bool, temperature: float | None,
        ignore_index: int, dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        run = partial(
            forward, ignore_index=ignore_index, temperature=temperature, beta=None,
            probabilities=temperature is None and not log_target, reduction=reduction,
            divide=divisor(input, labels, reduction, input.size(0)), dtype=dtype or input.dtype,
        )  # fmt: skip
        return in_rows(("input", "target", "labels"), (input, target, labels), ("out",), run)

    def kl_div_bwd(
        grad_out: Tensor, input: Tensor, target: Tensor, labels: Maybe, logs: Tensor, sums: Tensor, total: Tensor,
        log_target: bool, temperature: float | None, ignore_index: int, needs: tuple[bool, bool],
    ) -> tuple[Maybe, Maybe]:  # fmt: skip
        run = partial(
            backward, logs=logs, sums=sums, total=total, ignore_index=ignore_index, temperature=temperature, beta=None,
            probabilities=temperature is None and not log_target, needs=needs,
        )  # fmt: skip
        return in_rows(("grad_out", "input", "target", "labels"), (grad_out, input, target, labels), ("input", "target"), run)

    return kl_div_fwd, kl_div_bwd


def jsd_host(forward: Callable[..., Any], backward: Callable[..., Any]) -> Host:
    def jsd_fwd(
        input: Tensor, target: Tensor, labels: Maybe, beta: float, reduction: str, temperature: float | None,
        ignore_index: int, dtype: torch.dtype | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x, y, share = ordered(input, target, beta)
        divide = divisor(input, labels, reduction, input.size(0))
        return forward(x, y, labels, ignore_index, temperature, share, False, reduction, divide, dtype or input.dtype)

    def jsd_bwd(
        grad_out: Tensor, input: Tensor, target: Tensor, labels: Maybe, logs: Tensor, sums: Tensor, total: Tensor,
        beta: float, temperature: float | None, ignore_index: int, needs: tuple[bool, bool],
    ) -> tuple[Maybe, Maybe]:  # fmt: skip
        x, y, share = ordered(input, target, beta)
        first, second, _ = ordered(*needs, beta)
        options = ignore_index, temperature, share, False, (first, second)
        grad_x, grad_y = backward(grad_out, x, y, labels, logs, sums, total, *options)
        return ordered(grad_x, grad_y, beta)[:2]

    return jsd_fwd, jsd_bwd

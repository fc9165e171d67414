"""Kullback-Leibler divergence of a student's distribution from a teacher's."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ._divergence import EXTRAS, check_pair, cost, empty_out, pair, reduced, softened, weighted
from ._op import Draw, Op


def kl_div(
    input: Tensor, target: Tensor, labels: Tensor | None = None, *,
    reduction: Literal["mean", "batchmean", "sum", "none"] = "mean", log_target: bool = False,
    temperature: float | None = None, ignore_index: int = -100, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Kullback-Leibler divergence `KL(P || Q) = sum(P * (log(P) - log(Q)))` of each row's distributions, reduced.

    Without a temperature `log(Q) = input`, the student's, and `P = target`, the teacher's, or `exp(target)` with `log_target`.
    With one, both hold logits: `log(Q) = log_softmax(input / temperature)`, `log(P) = log_softmax(target / temperature)`.

    Args:
        input: (..., V), log-probabilities, or logits with a temperature, in any strides; float32, float16 or bfloat16. The
            arithmetic is float32.
        target: (..., V), probabilities, log-probabilities or logits, of any of these dtypes. Both get gradients, where they
            need them.
        labels: (...), int64 or int32: rows whose label is `ignore_index` count for nothing and get no gradient. By default all
            count. Nothing else is done with a label.
        reduction: "none" gives each term of the sums, "sum" their sum, "mean" the sum over the number of terms in rows that
            count, "batchmean" the sum over the number of rows that count with `labels`, and without over `input.size(0)`: NaN
            where none counts.
        log_target: whether `target` holds log-probabilities. It must be False with a temperature.
        temperature: more than 0. Log-probabilities are then never in memory. The result isn't multiplied by its square.
        ignore_index: see `labels`.
        dtype: the result's, by default that of `input` (float32 under autocast).

    Returns:
        A scalar, or for "none" (..., V). Where P is 0 the term is 0 and so are its derivatives, whatever the input.

    Raises:
        TypeError: an argument is of another type, or a tensor of another dtype.
        ValueError: shapes do not match; an option is out of range; `input` is not on a GPU.

    As `torch.nn.functional.kl_div`, whose derivative for a target of 0 is NaN, as is its term where the input is infinite, too.
    Temperature: Hinton et al. 2015, who multiply by its square.
    """
    if temperature is None:
        log_q, log_p = input, target if log_target else target.masked_fill(target == 0, 1).log()
    else:
        log_q, log_p = (torch.log_softmax(t / temperature, -1) for t in (input, target))
    p = target if temperature is None and not log_target else log_p.exp()
    batch = input.shape[0] if input.ndim else 1
    return reduced(weighted(p, log_p - log_q), labels, ignore_index, reduction, batch, dtype, input.dtype)


def check(input, target, labels, reduction, log_target, temperature, ignore_index, dtype) -> None:
    check_pair("kl_div", input, target, labels, temperature, dtype)
    if log_target and temperature is not None:
        raise ValueError(f"kl_div: log_target must be False where temperature, {temperature}, is given, got True")


def eager(
    input, target, labels=None, *, reduction="mean", log_target=False, temperature=None, ignore_index=-100, dtype=None
) -> Tensor:
    if temperature is None:
        of, to = input, target
    else:
        of, to, log_target = softened(input, temperature), softened(target, temperature), True
    if labels is None and reduction != "mean":
        loss = F.kl_div(of, to, reduction=reduction, log_target=log_target)
    else:
        # For "mean" it would warn.
        terms = F.kl_div(of, to, reduction="none", log_target=log_target)
        loss = terms.mean() if labels is None else reduced(terms, labels, ignore_index, reduction, 1, None, terms.dtype)
    default = torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype
    return loss.to(dtype or default)


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield pair(1, 1, log=False)(draw)
    yield pair(5, 33, reduction="none", log_target=True)(draw)
    yield pair(2, 9001, temperature=1.0, reduction="batchmean", dtype=torch.float32)(draw)
    yield pair(2, 3, 300, log=False, reduction="batchmean")(draw)
    yield pair(129, reduction="sum", log_target=True)(draw)
    yield pair(5, 129, labels=True, reduction="batchmean", temperature=0.5)(draw) | {"labels": draw.integers(-1, 1, 5).int()}
    yield pair(2, 2, 65, labels=True, reduction="none", temperature=3.0)(draw)
    masked = pair(4, 130, labels=True, log=False)(draw)
    masked["input"][:2, 60:], masked["target"][:3, 60:] = -torch.inf, 0
    yield masked


workloads = {
    "llama-3.1-8b/distil-4k": pair(4096, 128256, reduction="batchmean", temperature=1.0),
    "llama-3.1-8b/log-probabilities-4k": pair(4096, 128256, reduction="batchmean", log_target=True),
    "qwen-3-8b/distil-4k": pair(4096, 151936, labels=True, ignore_index=-100, reduction="batchmean", temperature=2.0),
    "gemma-2-9b/distil-2k": pair(2048, 256000, reduction="batchmean", temperature=1.0),
    "mistral-7b/decode-64": pair(64, 32000, reduction="batchmean", temperature=1.0),
    "odd-50257": pair(1000, 50257, reduction="batchmean", log=False),
}


op = Op(
    fn=kl_div,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={
        "out": lambda input, target, labels, reduction, log_target, temperature, ignore_index, dtype: empty_out(
            input, reduction, dtype
        )
    },
    extras=EXTRAS,
    grads={"input": "input", "target": "target"},
    # Kernels get the tensors as they are: "batchmean" divides by the first size.
    dtypes={"labels": (torch.int64, torch.int32)},
    eager=eager,
    autocast=lambda *values: {"dtype": values[-1] or torch.float32},
    # A term is of the difference of two log-probabilities, of size 10 or so, and has their roundings.
    slack={torch.float32: 32},
)

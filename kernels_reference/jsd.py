"""Generalised Jensen-Shannon divergence of a student's and a teacher's distributions."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ._divergence import EXTRAS, ROWS, check_pair, cost, empty_out, pair, reduced, softened, weighted
from ._op import Draw, Op


def jsd(
    input: Tensor, target: Tensor, labels: Tensor | None = None, *, beta: float = 0.5,
    reduction: Literal["batchmean", "mean", "sum", "none"] = "batchmean", temperature: float | None = None,
    ignore_index: int = -100, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Generalised Jensen-Shannon divergence of each row's two distributions, reduced over the rows.

    With the teacher's `P = exp(target)`, the student's `Q = exp(input)` and their mixture `M = beta * P + (1 - beta) * Q`, it
    is `beta * KL(P || M) + (1 - beta) * KL(Q || M)`, where `KL(P || M) = sum(P * log(P / M))` over the last dimension. At the
    ends, where that is 0, it is by convention what it becomes there over beta or over 1 - beta: the forward `KL(P || Q)` for
    `beta = 0`, the reverse `KL(Q || P)` for `beta = 1`.

    Args:
        input: (..., V), the student's log-probabilities, in any strides; float32, float16 or bfloat16. The arithmetic is
            float32.
        target: (..., V), the teacher's, of any of these dtypes. Both get gradients, where they need them.
        labels: (...), int64 or int32: rows whose label is `ignore_index` count for nothing and get no gradient. By default all
            count. Nothing else is done with a label.
        beta: from 0 to 1.
        reduction: "none" gives each term of the sums, "sum" their sum, "batchmean" the sum over the number of rows that count,
            "mean" that over V too: NaN where no row counts.
        temperature: more than 0. Both tensors then hold logits, and their log-probabilities are
            `log_softmax(logits / temperature)`, which are never in memory. The result isn't multiplied by its square.
        ignore_index: see `labels`.
        dtype: the result's, by default that of `input` (float32 under autocast).

    Returns:
        A scalar, or for "none" (..., V). A probability of 0 contributes 0, whatever it is compared with.

    Raises:
        TypeError: an argument is of another type, or a tensor of another dtype.
        ValueError: shapes do not match; an option is out of range; `input` is not on a GPU.

    As in GKD (Agarwal et al. 2023, arXiv 2306.13649) and Liger Kernel.
    """
    log_q, log_p = (t if temperature is None else torch.log_softmax(t / temperature, -1) for t in (input, target))
    p, q = log_p.exp(), log_q.exp()
    if beta in (0, 1):
        terms = weighted(p, log_p - log_q) if beta == 0 else weighted(q, log_q - log_p)
    else:
        # Where both are 0, their sum has no logarithm.
        none = (p == 0) & (q == 0)
        shares = log_p + math.log(beta), log_q + math.log(1 - beta)
        log_m = torch.logaddexp(*(t.masked_fill(none, 0) for t in shares))
        terms = beta * weighted(p, log_p - log_m) + (1 - beta) * weighted(q, log_q - log_m)
    return reduced(terms, labels, ignore_index, reduction, terms.shape[:-1].numel(), dtype, input.dtype)


def check(input, target, labels, beta, reduction, temperature, ignore_index, dtype) -> None:
    check_pair("jsd", input, target, labels, temperature, dtype)
    if not 0 <= beta <= 1:
        raise ValueError(f"jsd: beta must be from 0 to 1, got {beta}")


def eager(
    input, target, labels=None, *, beta=0.5, reduction="batchmean", temperature=None, ignore_index=-100, dtype=None
) -> Tensor:
    log_q, log_p = (t.float() if temperature is None else softened(t, temperature) for t in (input, target))
    if beta in (0, 1):
        of, to = (log_q, log_p) if beta == 0 else (log_p, log_q)
        terms = F.kl_div(of, to, reduction="none", log_target=True)
    else:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
        p_part, q_part = (F.kl_div(log_m, t, reduction="none", log_target=True) for t in (log_p, log_q))
        terms = beta * p_part + (1 - beta) * q_part
    default = torch.float32 if torch.is_autocast_enabled(input.device.type) else input.dtype
    return reduced(terms, labels, ignore_index, reduction, terms.shape[:-1].numel(), dtype, default)


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield pair(1, 1)(draw)
    yield pair(5, 33, labels=True, reduction="none", beta=0.3)(draw)
    yield pair(2, 9001, temperature=1.0, dtype=torch.float32)(draw)
    yield pair(2, 3, 300, labels=True, reduction="mean", beta=0.9)(draw)
    yield pair(5, 129, beta=0.0, reduction="sum")(draw)
    yield pair(5, 129, labels=True, beta=1.0, temperature=0.5)(draw)
    masked = pair(4, 130, beta=0.25, reduction="none", temperature=2.0)(draw)
    masked["input"][:2, 60:] = masked["target"][1:3, 90:] = -torch.inf
    yield masked


workloads = {
    "llama-3.1-8b/distil-4k": pair(4096, 128256, temperature=1.0),
    "llama-3.1-8b/log-probabilities-4k": pair(4096, 128256),
    "qwen-3-8b/distil-4k": pair(4096, 151936, temperature=2.0, beta=0.1, labels=True, ignore_index=-100),
    "gemma-2-9b/reverse-2k": pair(2048, 256000, temperature=1.0, beta=1.0),
    "mistral-7b/decode-64": pair(64, 32000, temperature=1.0),
    "odd-50257": pair(1000, 50257, temperature=1.0),
}


op = Op(
    fn=jsd,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={
        "out": lambda input, target, labels, beta, reduction, temperature, ignore_index, dtype: empty_out(
            input, reduction, dtype
        )
    },
    extras=EXTRAS,
    grads={"input": "input", "target": "target"},
    rows=ROWS,
    dtypes={"labels": (torch.int64, torch.int32)},
    eager=eager,
    autocast=lambda *values: {"dtype": values[-1] or torch.float32},
    # A term is of the difference of two log-probabilities, of size 10 or so, and has their roundings; on a GPU, also those
    # of its approximate exponentials and logarithms, by which two nearly equal logarithms differ.
    slack={torch.float32: 96},
)

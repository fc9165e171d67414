"""Softmax along one dimension."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._op import Cost, Draw, Op


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax: `exp(x - max(x)) / sum(exp(x - max(x)))` along `dim`.

    Args:
        x: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32.
        dim: the dimension that sums to one.

    Returns:
        A tensor with the shape and dtype of `x`. A slice of `-inf` alone, or with a `+inf` or NaN in it, is NaN.

    Raises:
        TypeError: `x` is no tensor, or of another dtype; `dim` is no int.
        ValueError: `x` has no dimension or is not on a GPU; `dim` is out of range.

    As `torch.nn.functional.softmax`.
    """
    e = torch.exp(x - x.amax(dim, keepdim=True)) if x.shape[dim] else x
    return e / e.sum(dim, keepdim=True)


def check(name: str, x: Tensor, dim: int) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have one dimension or more, got a scalar")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}: dim must be from {-x.ndim} to {x.ndim - 1} for x of shape {tuple(x.shape)}, got {dim}")


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    for shape in [(1, 1), (3, 7), (33, 128), (5, 1007), (2, 3, 65), (2, 1, 2, 3, 17), (9,)]:
        yield {"x": draw(*shape)}
    yield {"x": draw(1, 33001)}
    yield {"x": draw(3, 50, 5), "dim": 1}
    yield {"x": draw(130, 4), "dim": 0}
    masked = draw(4, 300)
    masked[0, 100:] = masked[1, :299] = -torch.inf
    yield {"x": masked}
    wide = draw(2, 20001)
    wide[0, 100:] = wide[1, :20000] = -torch.inf
    yield {"x": wide}


def cost(x: Tensor, dim: int = -1) -> tuple[Cost, Cost]:
    return Cost(2 * x.nbytes, 5 * x.numel()), Cost(3 * x.nbytes, 4 * x.numel())


workloads = {
    # Attention scores of one layer, a row for each head and query; router and sampling rows as wide as the vocabulary.
    "llama-3.1-8b/scores-1k": lambda draw: {"x": draw(32 * 1024, 1024)},
    "llama-3.1-70b/scores-4k": lambda draw: {"x": draw(2, 64, 512, 4096)},
    "llama-3.1-8b/sample-64": lambda draw: {"x": draw(64, 128256)},
    "gemma-3-27b/sample-1k": lambda draw: {"x": draw(1024, 262144)},
    "qwen-3-30b-a3b/router-8k": lambda draw: {"x": draw(8192, 128)},
    "mistral-7b/decode-16": lambda draw: {"x": draw(16 * 32, 1, 4097)},
    "square-8k": lambda draw: {"x": draw(8192, 8192)},
    "wide-32k": lambda draw: {"x": draw(2048, 32768)},
    "wide-128k": lambda draw: {"x": draw(1024, 131072)},
}


op = Op(
    fn=softmax,
    check=partial(check, "softmax"),
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": torch.empty_like},
    grads={"x": "out"},
    rows={"x": 1, "out": 1},
    eager=lambda x, dim=-1: torch.nn.functional.softmax(x, dim),
    autocast=lambda x, dim: {"x": x.float()},
)

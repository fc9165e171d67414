"""Rows of a table, chosen by index."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._arguments import has_values
from ._op import Cost, Draw, Op


def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` that `index` names: `out[..., :] = weight[index[...], :]`.

    Args:
        index: (...), int64 or int32, from 0 to V - 1.
        weight: (V, D), in any strides; float32, float16 or bfloat16.
        padding_idx: a row that gets no gradient, from -V to V - 1; negative ones count from the end.

    Returns:
        (..., D), in the dtype of `weight`. Its backward is deterministic: what a row is given is added in float32, in the order
        of the indices, and rounded once.

    Raises:
        TypeError: an argument is of another type, or a tensor of another dtype.
        ValueError: `weight` is no matrix; `padding_idx` is out of range; tensors are not on a GPU. An index out of range raises
            on a CPU. On a GPU that would have to be waited for: its row is NaN, and adds to no gradient.

    As `torch.nn.functional.embedding`.
    """
    return torch.nn.functional.embedding(index, weight, padding_idx)


def check(index: Tensor, weight: Tensor, padding_idx: int | None) -> None:
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight must have shape (V, D), got {tuple(weight.shape)}")
    V = weight.shape[0]
    if padding_idx is not None and not -V <= padding_idx < V:
        raise ValueError(f"embedding: padding_idx must be from {-V} to {V - 1} or None, got {padding_idx}")
    if has_values(index):
        for wrong in index[(index < 0) | (index >= V)]:
            raise ValueError(f"embedding: index must be from 0 to {V - 1}, got {int(wrong)}")


def empty_out(index: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(*index.shape, weight.shape[1])


def row_of_padding(weight: Tensor, padding_idx: int | None) -> int:
    """A row that is none where there is no padding."""
    return -1 if padding_idx is None else padding_idx % weight.shape[0]


def by_row(index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows in ascending order, where each comes from, and where in this order those of the same row begin and end."""
    rows, order = index.flatten().sort(stable=True)
    return rows, order, torch.searchsorted(rows, rows), torch.searchsorted(rows, rows, right=True)


def table(V: int, D: int, *shape: int, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"index": draw.integers(0, V, *shape), "weight": draw(V, D), **options}


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield table(1, 1, 1)(draw)
    yield table(11, 33, 5, 7)(draw)
    yield table(300, 1007, 2, 9, padding_idx=-1)(draw) | {"index": draw.integers(290, 300, 2, 9)}
    yield table(7, 64, 129, padding_idx=3)(draw) | {"index": draw.integers(0, 7, 129, dtype=torch.int32)}
    yield table(5, 4100)(draw)
    yield {"index": draw.integers(0, 9, 6, 4).mT, "weight": draw(48, 9).mT}


def cost(index: Tensor, weight: Tensor, padding_idx: int | None) -> tuple[Cost, Cost]:
    n = index.numel() * weight.shape[1]
    rows = n * weight.itemsize
    return Cost(index.nbytes + 2 * rows, n), Cost(index.nbytes + rows + weight.nbytes, n)


workloads = {
    "llama-3.1-8b/train-16k": table(128256, 4096, 8, 2048),
    "qwen-3-8b/prefill-8k": table(151936, 4096, 2, 4096),
    "gemma-3-27b/prefill-4k": table(262144, 5376, 4096, padding_idx=0),
    "gpt-2-xl/train-16k": table(50257, 1600, 16, 1024),
    "bert-base/train-64": table(30522, 768, 64, 512, padding_idx=0),
    "llama-3.1-8b/decode-64": table(128256, 4096, 64, 1),
    "odd-1007": table(50257, 1007, 4096),
}


op = Op(
    fn=embedding,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": empty_out},
    grads={"weight": "weight"},
    library=["backward"],
    dtypes={"index": (torch.int64, torch.int32)},
)

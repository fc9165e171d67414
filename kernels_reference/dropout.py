"""Dropout whose mask is computed from a seed, and never stored."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._dropout import check_dropout, drawn, dropped
from ._op import Cost, Draw, Op


def dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    """Dropout: `x / (1 - p)` where an element is kept, else 0; each is dropped with probability `p`.

    Args:
        x: any shape; float32, float16 or bfloat16. The arithmetic is float32.
        p: from 0, which keeps every element, to 1, which drops every one.
        seed: int64 of shape () or (1,), where `x` is: `torch.randint(2**62, (), device=x.device)` draws one. A tensor, so that
            a CUDA graph or a compiled step can draw another each time. Drawn inside a function that `torch.utils.checkpoint`
            runs, it is the same when that runs again. The mask depends on it and each element's index in C order alone: not on
            strides, dtype or GPU.

    Returns:
        A tensor in the dtype of `x`, with its shape. What is dropped is 0 even where `x` is infinite or NaN.

    Raises:
        TypeError: `x` or `seed` is no tensor, or of another dtype; `p` is no float.
        ValueError: `p` is out of range; `seed` has more than one element or dimension; `x` is not on a GPU.

    Srivastava et al., "Dropout" (2014). The backward computes the mask again, from a 32-bit hash of the index and the seed.
    """
    return dropped(x, p, seed)


def check(x: Tensor, p: float, seed: Tensor) -> None:
    check_dropout("dropout", p, seed)


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield drawn(1, p=0.5)(draw)
    for shape, p in [((3, 7), 0.5), ((31, 33), 0.1), ((2, 3, 4, 40), 0.9), ((5, 1007), 0), ((4, 64), 1), ((9, 8, 32), 0.3)]:
        yield drawn(*shape, p=p)(draw)
    yield {"x": draw(), "p": 0.2, "seed": draw.integers(-(2**62), 0, 1)}
    yield {"x": draw(3, 5, 66).transpose(1, 2), "p": 0.2, "seed": draw.integers(-(2**62), 0, 1)}


def cost(x: Tensor, p: float, seed: Tensor) -> tuple[Cost, Cost]:
    both = Cost(2 * x.nbytes + seed.nbytes, x.numel())
    return both, both


workloads = {
    "gpt-2-xl/train-8k": drawn(8, 1024, 1600),
    "bert-base/train-64": drawn(64, 512, 768),
    "t5-11b/train-8k": drawn(8192, 1024),
    "attention-scores/train-1k": drawn(8, 16, 1024, 1024),
    "llama-3.1-8b/lora-16k": drawn(8, 2048, 4096, p=0.05),
    "llama-3.1-8b/decode-64": drawn(64, 4096),
    "odd-11007": drawn(1000, 11007),
}


# Eager is the definition: `torch.nn.functional.dropout` drops other elements, and a baseline's errors are measured, too.
op = Op(
    fn=dropout,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": lambda x, *_: torch.empty_like(x)},
    grads={"x": "grad_out"},
    dtypes={"seed": (torch.int64,)},
)

"""Dropout and the residual sum that follows it: one pass, and no mask stored."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._dropout import check_dropout, drawn, dropped
from ._op import Cost, Draw, Op
from .add_rms_norm import check_residual


def dropout_add(x: Tensor, residual: Tensor, p: float, seed: Tensor) -> Tensor:
    """Dropout before a residual sum: `residual + dropout(x, p, seed)`, rounded once.

    Args:
        x: any shape; float32, float16 or bfloat16. The arithmetic is float32.
        residual: the shape of `x`, in its dtype or in float32: such a stream stays float32.
        p, seed: as `dropout` has them; the same elements are dropped.

    Returns:
        The sum, in the dtype of `residual`. Where `x` is dropped it is `residual` itself.

    Raises:
        TypeError: a tensor is none, or of another dtype; `p` is no float.
        ValueError: `residual` has another shape or dtype; `p` is out of range; `seed` has more than one element or dimension;
            `x` is not on a GPU.

    The end of each block of BERT, GPT-2 and T5 in training: one pass instead of two, and a backward that reads no mask.
    """
    return residual + dropped(x, p, seed)


def check(x: Tensor, residual: Tensor, p: float, seed: Tensor) -> None:
    check_residual("dropout_add", x, residual)
    check_dropout("dropout_add", p, seed)


def like(x: Tensor, *_: Any) -> Tensor:
    """What a backward needs of `x`, its shape and dtype, in the memory of one element."""
    return x.new_empty_strided(x.shape, (0,) * x.ndim)


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield drawn(1, p=0.5, residual=None)(draw)
    for shape, p in [((3, 7), 0.5), ((31, 33), 0.1), ((2, 3, 4, 40), 0.9), ((5, 1007), 0), ((4, 64), 1), ((9, 8, 32), 0.3)]:
        yield drawn(*shape, p=p, residual=None)(draw)
        yield drawn(*shape, p=p, residual=torch.float32)(draw)
    yield {"x": draw(), "residual": draw(), "p": 0.2, "seed": draw.integers(-(2**62), 0, 1)}
    yield {"x": draw(3, 5, 66).mT, "residual": draw(3, 66, 5), "p": 0.2, "seed": draw.integers(-(2**62), 0, 1)}


def cost(x: Tensor, residual: Tensor, p: float, seed: Tensor) -> tuple[Cost, Cost]:
    moved = x.nbytes + 2 * residual.nbytes + seed.nbytes
    return Cost(moved, 2 * x.numel()), Cost(moved, x.numel())


workloads = {
    "gpt-2-xl/train-8k": drawn(8, 1024, 1600, residual=None),
    "gpt-2-xl/train-8k-float32": drawn(8, 1024, 1600, residual=torch.float32),
    "bert-base/train-64": drawn(64, 512, 768, residual=None),
    "t5-11b/train-8k": drawn(8192, 1024, residual=None),
    "llama-3.1-8b/lora-16k": drawn(8, 2048, 4096, p=0.05, residual=None),
    "llama-3.1-8b/decode-64": drawn(64, 4096, residual=None),
    "odd-11007": drawn(1000, 11007, residual=None),
}


# Eager is the definition, for the same reason as that of dropout.
op = Op(
    fn=dropout_add,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": lambda x, residual, *_: torch.empty_like(residual)},
    extras={"like": like},
    grads={"x": "like", "residual": "grad_out"},
    dtypes={"seed": (torch.int64,)},
)

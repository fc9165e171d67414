"""GeGLU: the gated activation of the MLP of Gemma and T5."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ._glu import Maybe, check_halves, empty_out, layouts, moved, packed, separate, split
from ._op import Cost, Draw, Op

Approximate = Literal["none", "tanh"]


def geglu(
    gate: Tensor, up: Tensor | None = None, *, interleaved: bool = False, approximate: Literal["none", "tanh"] = "none"
) -> Tensor:
    """GeGLU: `gelu(gate) * up`, with `gelu(x) = x * (1 + erf(x / sqrt(2))) / 2`.

    Args:
        gate: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32. Without `up` it
            holds both, packed in the last dimension, of width `2 * D`: `gate = packed[..., :D]`, `up = packed[..., D:]`.
        up: the shape and dtype of `gate`, in any strides: the halves of `packed.chunk(2, -1)` are read where they lie.
        interleaved: the packed layout is `gate = packed[..., 0::2]`, `up = packed[..., 1::2]`.
        approximate: as in `F.gelu`; "tanh" is `gelu(x) = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2`.

    Returns:
        A tensor in the dtype of `gate`, with its shape; without `up`, `(..., D)`. A packed tensor's gradient is packed.

    Raises:
        TypeError: `gate` or `up` is no tensor, or of another dtype; `up` has not the dtype of `gate`.
        ValueError: the shapes differ; the packed width is odd; `interleaved` with `up`; `gate` is not on a GPU; an unknown
            `approximate`.

    Shazeer, "GLU Variants Improve Transformer" (2020). Gemma and T5 1.1 take "tanh", ModernBERT "none".
    """
    gate, up = split(gate, up, interleaved)
    if approximate == "tanh":
        return gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    return gate * (1 + torch.erf(gate * math.sqrt(0.5))) / 2 * up


def check(gate: Tensor, up: Maybe, interleaved: bool, approximate: Approximate) -> None:
    check_halves("geglu", gate, up, interleaved)


def eager(gate: Tensor, up: Maybe = None, *, interleaved: bool = False, approximate: Approximate = "none") -> Tensor:
    gate, up = split(gate, up, interleaved)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    for i, sample in enumerate(layouts(draw)):
        yield {**sample, "approximate": ("none", "tanh")[i % 2]}
    yield packed(3, 2 * 129, approximate="tanh")(draw)
    yield separate(4, 129)(draw)


def cost(gate: Tensor, up: Maybe = None, *, interleaved: bool = False, approximate: Approximate = "none") -> tuple[Cost, Cost]:
    n, forward, backward = moved(gate, up)
    flops = (10, 21) if approximate == "tanh" else (6, 13)
    return Cost(forward, flops[0] * n), Cost(backward, flops[1] * n)


workloads = {
    "gemma-3-27b/prefill-4k": separate(4096, 21504, approximate="tanh"),
    "gemma-3-4b/decode-64": separate(64, 10240, approximate="tanh"),
    "gemma-2-9b/train-8k-packed": packed(4, 2048, 2 * 14336, approximate="tanh"),
    "flan-t5-xxl/train-8k": separate(16, 512, 10240, approximate="tanh"),
    "modernbert-large/train-16k-packed": packed(32, 512, 2 * 2624),
    "modernbert-large/encode-1": packed(1, 1, 2 * 2624),
    "odd-11007": separate(1000, 11007),
}


op = Op(
    fn=geglu,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": empty_out},
    grads={"gate": "gate", "up": "up"},
    rows={"gate": 1, "up": 1, "out": 1},
    eager=eager,
)

"""SwiGLU: the gated activation of a transformer's MLP."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._glu import Maybe, check_halves, empty_out, layouts, moved, packed, separate, split
from ._op import Cost, Draw, Op

Option = float | None


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """SwiGLU: `silu(gate) * up`, with `silu(x) = x * sigmoid(x)`; with options `x * sigmoid(alpha * x) * (up + offset)`.

    Args:
        gate: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32. Without `up` it
            holds both, packed in the last dimension, of width `2 * D`: `gate = packed[..., :D]`, `up = packed[..., D:]`.
        up: the shape and dtype of `gate`, in any strides: the halves of `packed.chunk(2, -1)` are read where they lie.
        interleaved: the packed layout is `gate = packed[..., 0::2]`, `up = packed[..., 1::2]`.
        alpha: scales the sigmoid's argument; finite.
        limit: first of all, `gate` is clamped to at most this, `up` to between `-limit` and this; more than 0. The gradient
            is `torch.clamp`'s: zero beyond the limit, and passed on at the limit itself. None clamps nothing.
        offset: added to `up` after it is clamped; finite. gpt-oss has alpha = 1.702, limit = 7.0 and offset = 1.0.

    Returns:
        A tensor in the dtype of `gate`, with its shape; without `up`, `(..., D)`. A packed tensor's gradient is packed.

    Raises:
        TypeError: `gate` or `up` is no tensor, or of another dtype; `up` has not the dtype of `gate`; an option is no float.
        ValueError: the shapes differ; the packed width is odd; `interleaved` with `up`; `gate` is not on a GPU; an option is
            out of range.

    Shazeer, "GLU Variants Improve Transformer" (2020), with beta = 1: the MLP of Llama, Mistral and Qwen. vLLM packs in halves.
    """
    gate, up = split(gate, up, interleaved)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


def check(gate: Tensor, up: Maybe, interleaved: bool, alpha: float, limit: Option, offset: float) -> None:
    check_halves("swiglu", gate, up, interleaved)
    for name, value in (("alpha", alpha), ("offset", offset)):
        if not -math.inf < value < math.inf:
            raise ValueError(f"swiglu: {name} must be finite, got {value}")
    if limit is not None and not limit > 0:
        raise ValueError(f"swiglu: limit must be more than 0 or None, got {limit}")


def in_use(alpha: float, limit: Option, offset: float) -> tuple[Option, Option, Option]:
    """The options as kernels take them: None, which costs them nothing, where an option changes nothing."""
    return None if alpha == 1 else float(alpha), None if limit is None else float(limit), float(offset) or None


def eager(
    gate: Tensor, up: Maybe = None, *, interleaved: bool = False, alpha: float = 1, limit: Option = None, offset: float = 0
) -> Tensor:
    gate, up = split(gate, up, interleaved)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated = torch.nn.functional.silu(gate) if alpha == 1 else gate * torch.sigmoid(alpha * gate)
    return activated * (up + offset if offset else up)


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield from layouts(draw)
    yield packed(3, 5, 2 * 33, interleaved=True, alpha=1.702, limit=0.5, offset=1.0)(draw)
    yield packed(7, 2 * 40, limit=1)(draw)
    yield separate(5, 129, alpha=-0.5)(draw)
    yield separate(2, 1007, offset=-2.5)(draw)


def cost(gate: Tensor, up: Maybe = None, **options: Any) -> tuple[Cost, Cost]:
    n, forward, backward = moved(gate, up)
    more = sum(options.get(name, default) != default for name, default in (("alpha", 1), ("offset", 0)))
    clamps = 3 if options.get("limit") is not None else 0
    return Cost(forward, (5 + more + clamps) * n), Cost(backward, (12 + more + 2 * clamps) * n)


workloads = {
    "llama-3.1-8b/prefill-8k": separate(8192, 14336),
    "llama-3.1-8b/train-16k": separate(8, 2048, 14336),
    "llama-3.1-8b/decode-1": separate(1, 14336),
    "llama-3.1-70b/prefill-4k": separate(4096, 28672),
    "qwen-3-8b/decode-64": separate(64, 12288),
    "mistral-7b/prefill-4k-packed": packed(4096, 2 * 14336),
    # Eight experts a token, four in gpt-oss.
    "qwen-3-30b-a3b/experts-8k": packed(8 * 8192, 2 * 768),
    "gpt-oss-20b/experts-8k-interleaved": packed(4 * 8192, 2 * 2880, interleaved=True, alpha=1.702, limit=7.0, offset=1.0),
    "odd-11007": separate(1000, 11007),
}


op = Op(
    fn=swiglu,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": empty_out},
    grads={"gate": "gate", "up": "up"},
    rows={"gate": 1, "up": 1, "out": 1},
    eager=eager,
)

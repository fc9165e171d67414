"""SwiGLU: the gated activation of a transformer's MLP."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import Cost, Draw, Op


def swiglu(gate: Tensor, up: Tensor | None = None, *, interleaved: bool = False) -> Tensor:
    """SwiGLU: `silu(gate) * up`, with `silu(x) = x * sigmoid(x)`.

    Args:
        gate: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32. Without `up` it
            holds both, packed in the last dimension, of width `2 * D`: `gate = packed[..., :D]`, `up = packed[..., D:]`.
        up: the shape and dtype of `gate`, in any strides: the halves of `packed.chunk(2, -1)` are read where they lie.
        interleaved: the packed layout is `gate = packed[..., 0::2]`, `up = packed[..., 1::2]`.

    Returns:
        A tensor in the dtype of `gate`, with its shape; without `up`, `(..., D)`. A packed tensor's gradient is packed.

    Raises:
        TypeError: `gate` or `up` is no tensor, or of another dtype; `up` has not the dtype of `gate`.
        ValueError: the shapes differ; the packed width is odd; `interleaved` with `up`; `gate` is not on a GPU.

    Shazeer, "GLU Variants Improve Transformer" (2020), with beta = 1: the MLP of Llama, Mistral and Qwen. vLLM packs in halves.
    """
    gate, up = split(gate, up, interleaved)
    return gate * torch.sigmoid(gate) * up


def split(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of gate and up, packed or not."""
    if up is not None:
        return gate, up
    if interleaved:
        return gate[..., 0::2], gate[..., 1::2]
    D = gate.shape[-1] // 2
    return gate.narrow(-1, 0, D), gate.narrow(-1, D, D)


def check(gate: Tensor, up: Tensor | None, interleaved: bool) -> None:
    if gate.ndim == 0:
        raise ValueError("swiglu: gate must have one dimension or more, got a scalar")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"swiglu: gate must have an even last dimension where it is packed, got shape {tuple(gate.shape)}")
        return
    if interleaved:
        raise ValueError("swiglu: interleaved must be False where up is given, got True; it is a layout of one packed tensor")
    if up.dtype != gate.dtype:
        raise TypeError(f"swiglu: up must have the dtype of gate, {gate.dtype}, got {up.dtype}")
    if up.shape != gate.shape:
        raise ValueError(f"swiglu: up must have the shape of gate, {tuple(gate.shape)}, got {tuple(up.shape)}")


def eager(gate: Tensor, up: Tensor | None = None, *, interleaved: bool = False) -> Tensor:
    gate, up = split(gate, up, interleaved)
    return torch.nn.functional.silu(gate) * up


def empty_out(gate: Tensor, up: Tensor | None, interleaved: bool) -> Tensor:
    return gate.new_empty(gate.shape[0], gate.shape[1] // 2) if up is None else torch.empty_like(gate)


def separate(*shape: int) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"gate": draw(*shape), "up": draw(*shape)}


def packed(*shape: int, interleaved: bool = False) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"gate": draw(*shape), "interleaved": interleaved}


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    for shape in [(1, 1), (3, 7), (31, 33), (2, 3, 129), (5, 1007), (1,)]:
        yield separate(*shape)(draw)
    for interleaved in (False, True):
        yield packed(2, 2 * 1007, interleaved=interleaved)(draw)
        yield packed(1025, 2, interleaved=interleaved)(draw)
        yield packed(2, 3, 2 * 7, interleaved=interleaved)(draw)
    halves = draw(2, 3, 2 * 1280)
    yield {"gate": halves[..., :1280], "up": halves[..., 1280:]}
    yield {"gate": draw(4, 64) * 100, "up": draw(4, 64)}


def cost(gate: Tensor, up: Tensor | None = None, *, interleaved: bool = False) -> tuple[Cost, Cost]:
    half, n = (gate.nbytes // 2, gate.numel() // 2) if up is None else (gate.nbytes, gate.numel())
    return Cost(3 * half, 5 * n), Cost(5 * half, 12 * n)


workloads = {
    "llama-3.1-8b/prefill-8k": separate(8192, 14336),
    "llama-3.1-8b/train-16k": separate(8, 2048, 14336),
    "llama-3.1-8b/decode-1": separate(1, 14336),
    "llama-3.1-70b/prefill-4k": separate(4096, 28672),
    "qwen-3-8b/decode-64": separate(64, 12288),
    "mistral-7b/prefill-4k-packed": packed(4096, 2 * 14336),
    # Eight experts a token, four in gpt-oss. Its activation clamps and scales besides; the layout and sizes are its own.
    "qwen-3-30b-a3b/experts-8k": packed(8 * 8192, 2 * 768),
    "gpt-oss-20b/experts-8k-interleaved": packed(4 * 8192, 2 * 2880, interleaved=True),
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

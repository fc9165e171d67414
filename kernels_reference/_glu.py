"""What the gated activations share: how gate and up are packed, what is refused, inputs for tests and benchmarks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._draw import Draw

Maybe = Tensor | None


def split(gate: Tensor, up: Maybe, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of gate and up, packed or not."""
    if up is not None:
        return gate, up
    if interleaved:
        return gate[..., 0::2], gate[..., 1::2]
    D = gate.shape[-1] // 2
    return gate.narrow(-1, 0, D), gate.narrow(-1, D, D)


def check_halves(op: str, gate: Tensor, up: Maybe, interleaved: bool) -> None:
    if gate.ndim == 0:
        raise ValueError(f"{op}: gate must have one dimension or more, got a scalar")
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"{op}: gate must have an even last dimension where it is packed, got shape {tuple(gate.shape)}")
        return
    if interleaved:
        raise ValueError(f"{op}: interleaved must be False where up is given, got True; it is a layout of one packed tensor")
    if up.dtype != gate.dtype:
        raise TypeError(f"{op}: up must have the dtype of gate, {gate.dtype}, got {up.dtype}")
    if up.shape != gate.shape:
        raise ValueError(f"{op}: up must have the shape of gate, {tuple(gate.shape)}, got {tuple(up.shape)}")


def empty_out(gate: Tensor, up: Maybe = None, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape[0], gate.shape[1] // 2) if up is None else torch.empty_like(gate)


def separate(*shape: int, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"gate": draw(*shape), "up": draw(*shape), **options}


def packed(*shape: int, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"gate": draw(*shape), **options}


def layouts(draw: Draw) -> Iterator[dict[str, Any]]:
    """Samples of every layout."""
    for shape in [(1, 1), (3, 7), (31, 33), (2, 3, 129), (5, 1007), (1,)]:
        yield separate(*shape)(draw)
    for interleaved in (False, True):
        yield packed(2, 2 * 1007, interleaved=interleaved)(draw)
        yield packed(1025, 2, interleaved=interleaved)(draw)
        yield packed(2, 3, 2 * 7, interleaved=interleaved)(draw)
    halves = draw(2, 3, 2 * 1280)
    yield {"gate": halves[..., :1280], "up": halves[..., 1280:]}
    yield {"gate": draw(4, 64) * 100, "up": draw(4, 64)}


def moved(gate: Tensor, up: Maybe) -> tuple[int, int, int]:
    """The number of outputs, and the bytes that a forward and a backward move."""
    half, n = (gate.nbytes // 2, gate.numel() // 2) if up is None else (gate.nbytes, gate.numel())
    return n, 3 * half, 5 * half

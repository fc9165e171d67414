"""What dropout and dropout_add share: which elements are kept, what is refused, how kernels see their tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._draw import Draw

Maybe = Tensor | None
MASK = 0xFFFFFFFF


def threshold_of(p: float) -> int:
    """Elements are dropped whose 32 random bits are less: with 2**32, all."""
    return round(p * 2**32)


def scale_of(p: float) -> float:
    """What kept elements are multiplied by; 1 where none is kept."""
    return 1 / (1 - p) if p < 1 else 1.0


def mix(h: Tensor) -> Tensor:
    """A bijection of 32 bits, in int64, that leaves no pattern: "lowbias32" of Wellons's hash prospector."""
    h = h ^ h >> 16
    h = h * 0x7FEB352D & MASK
    h = h ^ h >> 15
    h = h * 0x846CA68B & MASK
    return h ^ h >> 16


def keep(index: Tensor, p: float, seed: Tensor) -> Tensor:
    """Whether the elements of these indices, in int64, are kept."""
    seed = seed.reshape(())
    key0 = mix((seed & MASK) + 0x9E3779B9 & MASK)
    key1 = mix((seed >> 32 & MASK) ^ key0)
    h = index & MASK ^ key0
    h = h ^ h >> 16
    h = h * 0x7FEB352D + key1 + (index >> 32) * 0x85EBCA6B & MASK
    h = h ^ h >> 15
    h = h * 0x846CA68B & MASK
    return h ^ h >> 16 >= threshold_of(p)


def dropped(x: Tensor, p: float, seed: Tensor) -> Tensor:
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    # Not a product: what is dropped may be infinite or NaN.
    return torch.where(keep(index, p, seed), x / (1 - p if p < 1 else 1), 0)


def check_dropout(op: str, p: float, seed: Tensor) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: p must be from 0 to 1, got {p}")
    if seed.ndim > 1 or seed.numel() != 1:
        raise ValueError(f"{op}: seed must have one element, in shape () or (1,), got shape {tuple(seed.shape)}")


def drawn(*shape: int, p: float = 0.1, **residual: torch.dtype | None) -> Callable[[Draw], dict[str, Any]]:
    """With a residual of its own dtype, where one is given, or of that of `x`, where that is None."""

    def make(draw: Draw) -> dict[str, Any]:
        others = {name: draw(*shape, dtype=dtype) for name, dtype in residual.items()}
        return {"x": draw(*shape), **others, "p": p, "seed": draw.integers(0, 2**62)}

    return make


def in_three(out: Tensor, *others: Maybe) -> tuple[list[Any], list[int]] | None:
    """Views of shape (A, M, N), in the order in which `out` lies in memory, and the strides of the index in C order.

    All are one long row where they are contiguous. None where not even three dimensions describe them.
    """
    tensors = [t for t in (out, *others) if t is not None]
    if all(t.is_contiguous() for t in tensors):
        shape, strides = [1, 1, out.numel()], [[0, 0, 1]] * (len(tensors) + 1)
    else:
        merged = _merged(out.shape, [*(t.stride() for t in tensors), _steps(out.shape)])
        if len(merged) > 3:
            return None
        merged = [(1, (0,) * (len(tensors) + 1))] * (3 - len(merged)) + merged
        shape, strides = [n for n, _ in merged], [[s[i] for _, s in merged] for i in range(len(tensors) + 1)]
    views = iter([t.as_strided(shape, stride) for t, stride in zip(tensors, strides[:-1], strict=True)])
    return [None if t is None else next(views) for t in (out, *others)], strides[-1]


def _steps(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    steps = [1]
    for n in shape[:0:-1]:
        steps.insert(0, steps[0] * n)
    return steps[: len(shape)]


def _merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """Sizes with all their strides, by the first ones' order; neighbours are one dimension where that is right for all."""
    dims = [(n, tuple(s[d] for s in strides)) for d, n in enumerate(shape) if n > 1]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for n, inner in sorted(dims, key=lambda dim: -dim[1][0]):
        if merged and merged[-1][1] == tuple(n * s for s in inner):
            merged[-1] = merged[-1][0] * n, inner
        else:
            merged.append((n, inner))
    return merged


def over_views(launch: Callable[..., None], out: Tensor, copy: Maybe, *inputs: Maybe) -> None:
    """Launches with the tensors as `in_three` sees them, and else on contiguous ones."""
    found = in_three(out, copy, *inputs)
    if found is not None:
        launch(*found)
        return
    tensors = [out, copy, *inputs]
    flat: list[Any] = [None if t is None else t.contiguous() for t in tensors]
    launch(*in_three(*flat))  # type: ignore[misc]
    for t, written in zip(tensors[:2], flat[:2], strict=True):
        if t is not None and written is not t:
            t.copy_(written)


def dropout_like(launch: Callable[..., None], x: Tensor, p: float, seed: Tensor) -> Tensor:
    """`launch` takes p, seed, a `like` whose only element it writes 0 to, or None, and what `over_views` gives."""
    out = torch.empty_like(x)
    over_views(partial(launch, p, seed, None), out, None, x, None)
    return out


def dropout_onto(launch: Callable[..., None], x: Tensor, residual: Tensor, like: Tensor, p: float, seed: Tensor) -> Tensor:
    out = torch.empty_like(residual)
    over_views(partial(launch, p, seed, like), out, None, x, residual)
    return out


def dropout_onto_backward(
    launch: Callable[..., None], grad_out: Tensor, like: Tensor, p: float, seed: Tensor, needs: Sequence[bool]
) -> tuple[Maybe, Maybe]:
    grad_x = torch.empty_like(like) if needs[0] else None
    grad_residual = torch.empty_like(grad_out) if needs[1] else None
    if grad_x is not None:
        over_views(partial(launch, p, seed, None), grad_x, grad_residual, grad_out, None)
    elif grad_residual is not None:
        over_views(partial(launch, 0.0, seed, None), grad_residual, None, grad_out, None)
    return grad_x, grad_residual

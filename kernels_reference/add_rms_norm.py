"""A residual sum and its root mean square normalisation."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import Cost, Draw, Op
from .rms_norm import Casting, Opt, by_hand, check_rows


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0,
    casting: Casting = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RMS norm of a residual stream after an addition: `total = x + residual`, and `rms_norm(total)`.

    Args:
        x: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32.
        residual: the shape of `x`, in its dtype or in float32: such a stream stays float32.
        weight, eps, offset, casting: as `rms_norm` has them.

    Returns:
        The normalised sum, in the dtype of `x`, and the sum, in that of `residual`. What is normalised is the sum as rounded.

    Raises:
        TypeError: a tensor is none, or of another dtype; `eps` or `offset` is no float.
        ValueError: `x` is a scalar or not on a GPU; `residual` has another shape or dtype; `weight` is not (N,); `eps` is
            negative; an unknown `casting`.

    One pass over the sum instead of two, forward and backward: the block of every pre-norm decoder, such as Llama's.
    """
    total, eps = x + residual, torch.finfo(x.dtype).eps if eps is None else eps
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    normed = normed.to(x.dtype) if casting == "llama" else normed
    return (normed if weight is None else normed * (weight + offset)).to(x.dtype), total


def eager(
    x: Tensor, residual: Tensor, weight: Opt = None, eps: float | None = None, *, offset: float = 0, casting: Casting = "none"
) -> tuple[Tensor, Tensor]:
    total, eps = x + residual, torch.finfo(x.dtype).eps if eps is None else eps
    return by_hand(total, weight, eps, offset, casting, x.dtype).to(x.dtype), total


def check_residual(name: str, x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape:
        raise ValueError(f"{name}: residual must have the shape {tuple(x.shape)} of x, got {tuple(residual.shape)}")
    if residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name}: residual must be {x.dtype}, as x is, or torch.float32, got {residual.dtype}")


def check(x: Tensor, residual: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> None:
    check_rows("add_rms_norm", x, eps, weight=weight)
    check_residual("add_rms_norm", x, residual)


def layer(*shape: int, dtype: torch.dtype | None = None, eps: float = 1e-5, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    """With a residual stream of its own dtype, where one is given."""
    return lambda draw: {
        "x": draw(*shape), "residual": draw(*shape, dtype=dtype), "weight": draw(shape[-1]), "eps": eps, **options
    }  # fmt: skip


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield layer(2, 1, eps=2.0)(draw)
    for shape in [(3, 7), (31, 129), (3, 43, 6), (9,)]:
        yield layer(*shape, casting="llama")(draw)
    yield layer(5, 1007, dtype=torch.float32, casting="llama")(draw)
    yield layer(33, 2, 96, dtype=torch.float32, casting="gemma", offset=1.0)(draw)
    yield {"x": draw(2, 3, 100), "residual": draw(2, 3, 100)}
    yield layer(33, 8200)(draw)
    yield layer(2, 33001, dtype=torch.float32)(draw)


def cost(x: Tensor, residual: Tensor, weight: Opt = None, *_: Any, **options: Any) -> tuple[Cost, Cost]:
    scale = 0 if weight is None else weight.nbytes
    # Both gradients are one where x and residual have one dtype.
    gradients = residual.nbytes + (x.nbytes if x.dtype != residual.dtype else 0)
    backward = x.nbytes + 2 * residual.nbytes + gradients + 2 * scale
    return Cost(2 * (x.nbytes + residual.nbytes) + scale, 5 * x.numel()), Cost(backward, 10 * x.numel())


workloads = {
    "llama-3.1-8b/prefill-8k": layer(8192, 4096, casting="llama"),
    "llama-3.1-8b/train-16k": layer(8, 2048, 4096, casting="llama"),
    "llama-3.1-8b/train-16k-float32": layer(8, 2048, 4096, casting="llama", dtype=torch.float32),
    "llama-3.1-8b/decode-64": layer(64, 4096, casting="llama"),
    "llama-3.1-70b/prefill-4k": layer(4096, 8192, casting="llama"),
    "llama-3.1-70b/decode-1": layer(1, 8192, casting="llama"),
    "gemma-3-27b/train-16k": layer(8, 2048, 5376, eps=1e-6, offset=1.0, casting="gemma"),
    "odd-4097": layer(1000, 4097),
    "wide-65537": layer(512, 65537),
}


op = Op(
    fn=add_rms_norm,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={
        "out": lambda x, *_: torch.empty_like(x),
        "total": lambda x, residual, *_: torch.empty_like(x, dtype=residual.dtype),
    },
    extras={"rstd": lambda x, *_: x.new_empty(x.shape[0], dtype=torch.float32)},
    grads={"x": "grad_out", "residual": "total", "weight": "weight"},
    same={"x": "residual"},
    rows={"x": 1, "residual": 1, "out": 1, "total": 1, "rstd": 0},
    eager=eager,
)

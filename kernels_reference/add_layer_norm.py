"""A residual sum and its layer normalisation."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import Cost, Draw, Op
from .add_rms_norm import check_residual
from .rms_norm import Opt, check_rows


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Layer norm of a residual stream after an addition: `total = x + residual`, and `layer_norm(total)`.

    Args:
        x: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32.
        residual: the shape of `x`, in its dtype or in float32: such a stream stays float32.
        weight, bias, eps: as `layer_norm` has them.

    Returns:
        The normalised sum, in the dtype of `x`, and the sum, in that of `residual`. What is normalised is the sum as rounded.

    Raises:
        TypeError: a tensor is none, or of another dtype; `eps` is no float.
        ValueError: `x` is a scalar or not on a GPU; `residual` has another shape or dtype; `weight` or `bias` is not (N,);
            `eps` is negative.

    One pass over the sum instead of two, forward and backward: the block of GPT-2, OPT and most encoders.
    """
    total = x + residual
    centred = total - total.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype), total


def eager(x: Tensor, residual: Tensor, weight: Opt = None, bias: Opt = None, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    total = x + residual
    weight, bias = (None if t is None else t.to(total.dtype) for t in (weight, bias))
    return torch.nn.functional.layer_norm(total, total.shape[-1:], weight, bias, eps).to(x.dtype), total


def check(x: Tensor, residual: Tensor, weight: Opt, bias: Opt, eps: float) -> None:
    check_rows("add_layer_norm", x, eps, weight=weight, bias=bias)
    check_residual("add_layer_norm", x, residual)


def layer(*shape: int, dtype: torch.dtype | None = None, eps: float = 1e-5) -> Callable[[Draw], dict[str, Any]]:
    """With a residual stream of its own dtype, where one is given."""
    return lambda draw: {
        "x": draw(*shape), "residual": draw(*shape, dtype=dtype), "weight": draw(shape[-1]), "bias": draw(shape[-1]), "eps": eps
    }  # fmt: skip


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield layer(3, 1, eps=2.0)(draw)
    for shape in [(3, 7), (31, 129), (3, 43, 6), (9,)]:
        yield layer(*shape)(draw)
    yield layer(5, 1007, dtype=torch.float32)(draw)
    yield {"x": draw(2, 3, 100), "residual": draw(2, 3, 100)}
    yield {"x": draw(33, 40), "residual": draw(33, 40), "bias": draw(40)}
    yield layer(33, 8200)(draw)
    yield layer(2, 33001, dtype=torch.float32)(draw)


def cost(x: Tensor, residual: Tensor, weight: Opt = None, bias: Opt = None, eps: float = 1e-5) -> tuple[Cost, Cost]:
    scale, shift = (0 if t is None else t.nbytes for t in (weight, bias))
    # Both gradients are one where x and residual have one dtype.
    gradients = residual.nbytes + (x.nbytes if x.dtype != residual.dtype else 0)
    backward = x.nbytes + 2 * residual.nbytes + gradients + 2 * scale + shift
    return Cost(2 * (x.nbytes + residual.nbytes) + scale + shift, 8 * x.numel()), Cost(backward, 14 * x.numel())


workloads = {
    "opt-6.7b/prefill-8k": layer(8192, 4096),
    "gpt-neox-20b/train-8k": layer(4, 2048, 6144),
    "opt-6.7b/train-8k-float32": layer(4, 2048, 4096, dtype=torch.float32),
    "bert-base/train-64": layer(64, 512, 768, eps=1e-12),
    "opt-6.7b/decode-64": layer(64, 4096),
    "odd-4097": layer(1000, 4097),
    "wide-65537": layer(512, 65537),
}


op = Op(
    fn=add_layer_norm,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={
        "out": lambda x, *_: torch.empty_like(x),
        "total": lambda x, residual, *_: torch.empty_like(x, dtype=residual.dtype),
    },
    extras={
        "mean": lambda x, *_: x.new_empty(x.shape[0], dtype=torch.float32),
        "rstd": lambda x, *_: x.new_empty(x.shape[0], dtype=torch.float32),
    },
    grads={"x": "grad_out", "residual": "total", "weight": "weight", "bias": "bias"},
    same={"x": "residual"},
    rows={"x": 1, "residual": 1, "out": 1, "total": 1, "mean": 0, "rstd": 0},
    eager=eager,
    # As in layer_norm.
    slack={torch.float32: 64},
)

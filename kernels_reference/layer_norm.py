"""Layer normalisation of the last dimension."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import Cost, Draw, Op
from .rms_norm import Opt, check_rows


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer norm: `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, of size N; var divides by N.

    Args:
        x: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32.
        weight: (N,), in one of these dtypes, not necessarily that of `x`. None means no scale.
        bias: the same, with or without a weight. None means no shift.
        eps: 0 or more.

    Returns:
        A tensor with the shape and dtype of `x`; under autocast float32, as with `F.layer_norm`.

    Raises:
        TypeError: `x`, `weight` or `bias` is no tensor, or of another dtype; `eps` is no float.
        ValueError: `x` is a scalar or not on a GPU; `weight` or `bias` is not (N,) or not on it; `eps` is negative.

    As `torch.nn.functional.layer_norm` over one dimension. Ba, Kiros and Hinton 2016 (arXiv 1607.06450).
    """
    centred = x - x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def eager(x: Tensor, weight: Opt = None, bias: Opt = None, eps: float = 1e-5) -> Tensor:
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def check(x: Tensor, weight: Opt, bias: Opt, eps: float) -> None:
    check_rows("layer_norm", x, eps, weight=weight, bias=bias)


def layer(*shape: int, dtype: torch.dtype | None = None, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {
        "x": draw(*shape),
        "weight": draw(shape[-1], dtype=dtype),
        "bias": draw(shape[-1], dtype=dtype),
        **options,
    }


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield layer(3, 1, eps=1.0)(draw)  # With a small eps a row of one element is all cancellation.
    for shape in [(3, 7), (31, 129), (3, 43, 6), (2, 1, 2, 3, 17), (9,)]:
        yield layer(*shape)(draw)
    yield layer(5, 1007, dtype=torch.float32, eps=1e-6)(draw)
    yield {"x": draw(2, 3, 100), "eps": 0.1}
    yield {"x": draw(33, 40), "weight": draw(40)}
    yield {"x": draw(60, 5), "bias": draw(5, dtype=torch.bfloat16)}
    yield layer(33, 8200)(draw)
    yield layer(2, 33001, dtype=torch.float32)(draw)


def cost(x: Tensor, weight: Opt = None, bias: Opt = None, eps: float = 1e-5) -> tuple[Cost, Cost]:
    scale, shift = (0 if t is None else t.nbytes for t in (weight, bias))
    return Cost(2 * x.nbytes + scale + shift, 7 * x.numel()), Cost(3 * x.nbytes + 2 * scale + shift, 13 * x.numel())


workloads = {
    "square-4k": layer(4096, 4096),
    "falcon-7b/train-8k": layer(8192, 4544),
    "gpt-neox-20b/prefill-4k": layer(4096, 6144),
    "opt-6.7b/prefill-8k": layer(8192, 4096),
    "command-r/prefill-8k": lambda draw: {"x": draw(8192, 8192), "weight": draw(8192)},
    "bert-base/train-64": layer(64, 512, 768, eps=1e-12),
    "vit-l-16/train-64": layer(64, 197, 1024, eps=1e-6),
    "opt-6.7b/decode-64": layer(64, 4096),
    "odd-4097": layer(1000, 4097),
    "wide-65537": layer(512, 65537),
}


op = Op(
    fn=layer_norm,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": lambda x, *_: torch.empty_like(x)},
    extras={
        "mean": lambda x, *_: x.new_empty(x.shape[0], dtype=torch.float32),
        "rstd": lambda x, *_: x.new_empty(x.shape[0], dtype=torch.float32),
    },
    grads={"x": "x", "weight": "weight", "bias": "bias"},
    rows={"x": 1, "out": 1, "mean": 0, "rstd": 0},
    eager=eager,
    autocast=lambda x, weight, bias, eps: {
        "x": x.float(),
        "weight": None if weight is None else weight.float(),
        "bias": None if bias is None else bias.float(),
    },
    # Rows of five are centred, too: where their spread is a tenth of their mean, each rounding counts ten times.
    slack={torch.float32: 64},
)

"""Normalisation of groups of channels, each with all of its positions."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._group_norm import Opt
from ._op import Cost, Draw, Op


def group_norm(x: Tensor, num_groups: int, weight: Opt = None, bias: Opt = None, eps: float = 1e-5) -> Tensor:
    """Group norm: `(x - mean) / sqrt(var + eps) * weight + bias`, where mean and var, which divides by the number of
    elements, are of C / num_groups channels that follow one another and of all their positions.

    Args:
        x: (N, C, *), any number of dimensions of positions or none; float32, float16 or bfloat16, in any memory format.
            The arithmetic is float32.
        num_groups: 1 or more, a divisor of C. It is 1 for a layer norm of all but N, and C for an instance norm.
        weight: (C,), in one of these dtypes, not necessarily that of `x`. None means no scale.
        bias: the same, with or without a weight. None means no shift.
        eps: 0 or more.

    Returns:
        A tensor with the shape, dtype and memory format of `x`; under autocast float32, as with `F.group_norm`.

    Raises:
        TypeError: `x`, `weight` or `bias` is no tensor, or of another dtype; `num_groups` is no int, or `eps` no float.
        ValueError: `x` has fewer than two dimensions or is not on a GPU; `num_groups` does not divide C; `weight` or `bias` is
            not (C,) or not on it; `eps` is negative.

    As `torch.nn.functional.group_norm`, which refuses a single element. Wu and He 2018 (arXiv 1803.08494).
    """
    groups = x.unflatten(1, (num_groups, x.shape[1] // num_groups)).flatten(2)
    centred = groups - groups.mean(-1, keepdim=True)
    normed = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    weight, bias = (None if t is None else t.view(-1, *[1] * (x.ndim - 2)) for t in (weight, bias))
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def eager(x: Tensor, num_groups: int, weight: Opt = None, bias: Opt = None, eps: float = 1e-5) -> Tensor:
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    if weight is None and bias is not None:  # On a CPU, its backward fails for a bias alone.
        weight = torch.ones_like(bias)
    return torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)


def check(x: Tensor, num_groups: int, weight: Opt, bias: Opt, eps: float) -> None:
    if x.ndim < 2:
        raise ValueError(f"group_norm: x must have two dimensions or more, (N, C, *), got shape {tuple(x.shape)}")
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"group_norm: num_groups must be 1 or more and divide x's {x.shape[1]} channels, got {num_groups}")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[1:2]:
            raise ValueError(f"group_norm: {name} must have shape {tuple(x.shape[1:2])}, as x's channels, got {tuple(t.shape)}")
    if not eps >= 0:
        raise ValueError(f"group_norm: eps must be 0 or more, got {eps}")


def layer(*shape: int, groups: int = 32, dtype: torch.dtype | None = None, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {
        "x": draw(*shape),
        "num_groups": groups,
        "weight": draw(shape[1], dtype=dtype),
        "bias": draw(shape[1], dtype=dtype),
        **options,
    }


def channels_last(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "x": arguments["x"].contiguous(memory_format=torch.channels_last)}


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield layer(3, 2, groups=2, eps=1.0)(draw)  # With a small eps a group of one element is all cancellation.
    yield layer(2, 6, 5, 3, groups=3)(draw)
    yield layer(1, 4, 3, 3, 2, 2, groups=1)(draw)
    yield layer(3, 12, 7, 9, groups=4, dtype=torch.float32, eps=1e-6)(draw)
    yield channels_last(layer(2, 12, 5, 7, groups=3)(draw))
    yield {"x": draw(3, 10, 33), "num_groups": 2, "weight": draw(10)}
    yield {"x": draw(9, 60), "num_groups": 5, "bias": draw(60, dtype=torch.bfloat16), "eps": 0.1}
    yield {"x": draw(1, 6, 2, 1, 31), "num_groups": 6}
    yield layer(2, 3, 41, 101, groups=1, dtype=torch.float32)(draw)
    yield layer(2, 1100, 3, groups=1)(draw)
    yield channels_last(layer(3, 66, 16, 33, groups=11)(draw))


def cost(x: Tensor, num_groups: int, weight: Opt = None, bias: Opt = None, eps: float = 1e-5) -> tuple[Cost, Cost]:
    scale, shift = (0 if t is None else t.nbytes for t in (weight, bias))
    return Cost(2 * x.nbytes + scale + shift, 7 * x.numel()), Cost(3 * x.nbytes + 2 * scale + shift, 13 * x.numel())


workloads = {
    "sdxl/unet-64": layer(2, 320, 128, 128),
    "sdxl/unet-32": layer(2, 1280, 32, 32),
    "sd-vae/decoder-512": layer(1, 128, 512, 512, eps=1e-6),
    "sd-1.5/train-16": layer(16, 320, 64, 64),
    "sd-1.5/channels-last-16": lambda draw: channels_last(layer(16, 320, 64, 64)(draw)),
    "wav2vec2/features-8": layer(8, 512, 3199, groups=512),
    "odd-33x31": layer(64, 60, 33, 31, groups=6),
}


op = Op(
    fn=group_norm,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": lambda x, *_: torch.empty_like(x)},
    extras={
        "mean": lambda x, num_groups, *_: x.new_empty(x.shape[0], num_groups, dtype=torch.float32),
        "rstd": lambda x, num_groups, *_: x.new_empty(x.shape[0], num_groups, dtype=torch.float32),
    },
    grads={"x": "x", "weight": "weight", "bias": "bias"},
    eager=eager,
    autocast=lambda x, num_groups, weight, bias, eps: {
        "x": x.float(),
        "weight": None if weight is None else weight.float(),
        "bias": None if bias is None else bias.float(),
    },
)

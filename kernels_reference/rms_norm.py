"""Root mean square normalisation of the last dimension."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ._op import Cost, Draw, Op

Casting = Literal["none", "llama", "gemma"]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0, casting: Casting = "none"
) -> Tensor:
    """RMS norm: `x / sqrt(mean(x**2) + eps) * (weight + offset)` over the last dimension, of size N.

    Args:
        x: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32.
        weight: (N,), in one of these dtypes, not necessarily x's. None means no scale at all, whatever `offset` is.
        eps: None means `torch.finfo(x.dtype).eps`, as `F.rms_norm` documents. (For half types it takes float32's.)
        offset: added to the weight in float32. Gemma 1 to 3 store the weight less 1, so there it is 1.0.
        casting: what is rounded, and when. All three are equal where everything is float32.
            "none": as `F.rms_norm`. The scaled result is rounded once, to the dtype of `x`. Under autocast `x` and `weight`
            become float32, and so the result, where the installed PyTorch's `F.rms_norm` does so.
            "gemma": as `GemmaRMSNorm`. The same arithmetic, which autocast does not change. It does not set `offset`.
            "llama": as `LlamaRMSNorm`. The normalised `x` is rounded to its dtype before it is multiplied by the weight.

    Returns:
        A tensor with the shape and dtype of `x`; with "llama" and a weight the dtype of `weight * x`, which is float32 where
        theirs differ.

    Raises:
        TypeError: `x` or `weight` is no tensor, or of another dtype; `eps` or `offset` is no float.
        ValueError: `x` has no dimension or is not on a GPU; `weight` is not of shape (N,) or on another device; `eps` is
            negative; `casting` is none of the three.

    Zhang and Sennrich 2019 (arXiv 1910.07467); Hugging Face's modelling code of Llama and Gemma. Gradients are those of the
    formula without its intermediate rounding.
    """
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed
    if casting == "llama":
        return normed.to(x.dtype) * (weight + offset)
    return (normed * (weight + offset)).to(x.dtype)


def eager(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0, casting: Casting = "none"
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if casting == "none" and not offset:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting == "llama":
        return (weight + offset if offset else weight) * normed.to(x.dtype)
    return (normed * (offset + weight.float())).to(x.dtype)


def check(x: Tensor, weight: Tensor | None, eps: float | None, offset: float, casting: Casting) -> None:
    if x.ndim == 0:
        raise ValueError("rms_norm: x must have one dimension or more, got a scalar")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must have shape ({x.shape[-1]},) for x of shape {tuple(x.shape)}, got {tuple(weight.shape)}"
        )
    if eps is not None and not eps >= 0:
        raise ValueError(f"rms_norm: eps must be 0 or more, got {eps}")


# PyTorch 2.11 does not list F.rms_norm among the ops that autocast runs in float32; 2.13 does, on GPUs. The dispatcher knows.
AUTOCAST_TO_FLOAT32 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


def autocast(x: Tensor, weight: Tensor | None, eps: float | None, offset: float, casting: Casting) -> Mapping[str, Any]:
    if casting != "none" or not AUTOCAST_TO_FLOAT32 or not x.is_cuda:
        return {}
    return {"x": x.float(), "weight": None if weight is None else weight.float()}


def empty_out(x: Tensor, weight: Tensor | None, eps: float | None, offset: float, casting: Casting) -> Tensor:
    promoted = casting == "llama" and weight is not None
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype) if promoted else x.dtype)


def empty_rstd(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    # The gradient of a row of one element is all cancellation, unless eps is large.
    yield {"x": draw(1, 1), "weight": draw(1), "eps": 1.0}
    for shape in [(3, 7), (2, 33), (31, 129), (2, 3, 65), (2, 1, 2, 3, 17), (9,)]:
        yield {"x": draw(*shape), "weight": draw(shape[-1]), "eps": 1e-6}
    wide = torch.float32
    yield {"x": draw(5, 1007), "weight": draw(1007, dtype=wide), "eps": 1e-5, "casting": "llama"}
    yield {"x": draw(33, 40), "weight": draw(40), "eps": 1e-5, "casting": "llama", "offset": 0.5}
    yield {"x": draw(33, 2, 96), "weight": draw(96), "eps": 1e-6, "casting": "gemma", "offset": 1.0}
    yield {"x": draw(127, 60), "weight": draw(60, dtype=wide), "eps": 1e-6}
    yield {"x": draw(1000, 5), "weight": draw(5, dtype=torch.bfloat16), "eps": 0.1, "offset": -1.0}
    yield {"x": draw(2, 3, 100), "eps": 1e-6, "offset": 1.0, "casting": "gemma"}
    yield {"x": draw(5, 16401), "weight": draw(16401), "eps": 1e-6}
    yield {"x": draw(1, 33001), "weight": draw(33001, dtype=wide), "eps": 1e-5, "casting": "llama"}


def cost(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0, casting: Casting = "none"
) -> tuple[Cost, Cost]:
    out, scale = empty_out(x, weight, eps, offset, casting).nbytes, 0 if weight is None else weight.nbytes
    return Cost(x.nbytes + out + scale, 4 * x.numel()), Cost(out + 2 * (x.nbytes + scale), 9 * x.numel())


def layer(*shape: int, eps: float = 1e-5, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"x": draw(*shape), "weight": draw(shape[-1]), "eps": eps, **options}


workloads = {
    "llama-3.1-8b/prefill-8k": layer(8192, 4096, casting="llama"),
    "llama-3.1-8b/train-16k": layer(8, 2048, 4096, casting="llama"),
    "llama-3.1-8b/decode-64": layer(64, 4096, casting="llama"),
    "llama-3.1-70b/prefill-4k": layer(4096, 8192, casting="llama"),
    "llama-3.1-70b/decode-1": layer(1, 8192, casting="llama"),
    "qwen-3-8b/prefill-8k": layer(8192, 4096, eps=1e-6, casting="llama"),
    # The norms of queries and keys: a row for each head.
    "qwen-3-8b/queries-8k": layer(2, 4096, 32, 128, eps=1e-6, casting="llama"),
    "qwen-3-8b/keys-decode-64": layer(64, 1, 8, 128, eps=1e-6, casting="llama"),
    "gemma-3-27b/prefill-4k": layer(4096, 5376, eps=1e-6, offset=1.0, casting="gemma"),
    "gemma-3-27b/train-16k": layer(8, 2048, 5376, eps=1e-6, offset=1.0, casting="gemma"),
    "mistral-7b/prefill-4k": layer(4096, 4096, casting="llama"),
    "square-8k": layer(8192, 8192),
    "odd-4097": layer(1000, 4097),
    "wide-65537": layer(512, 65537),
}


op = Op(
    fn=rms_norm,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": empty_out},
    extras={"rstd": empty_rstd},
    grads={"x": "x", "weight": "weight"},
    rows={"x": 1, "out": 1, "rstd": 0},
    eager=eager,
    autocast=autocast,
)

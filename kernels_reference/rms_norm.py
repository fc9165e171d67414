"""Root mean square normalisation of the last dimension."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ._op import Cost, Draw, Op

Casting = Literal["none", "llama", "gemma"]
Opt = Tensor | None


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float | None = None, *, offset: float = 0.0, casting: Casting = "none"
) -> Tensor:
    """RMS norm: `x / sqrt(mean(x**2) + eps) * (weight + offset)` over the last dimension, of size N.

    Args:
        x: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32.
        weight: (N,), in one of these dtypes, not necessarily that of `x`. None means no scale, whatever `offset` is.
        eps: None means `torch.finfo(x.dtype).eps`, as `F.rms_norm` documents; PyTorch 2.11 to 2.13 take float32's instead.
        offset: added to the weight, in float32. It is 1.0 for Gemma 1 to 3, which store the weight less 1.
        casting: what is rounded, and when. All agree where `x` and `weight` are float32.
            "none", as `F.rms_norm`: the result, to the dtype of `x`. Under autocast float32, if the installed F.rms_norm is.
            "gemma", as `GemmaRMSNorm`: the same, but autocast changes nothing. It does not set `offset`.
            "llama", as `LlamaRMSNorm`: the normalised `x`, to its dtype, before it is multiplied by the weight.

    Returns:
        A tensor with the shape and dtype of `x`. With "llama" its dtype is that of `weight * x`: float32, if theirs differ.

    Raises:
        TypeError: `x` or `weight` is no tensor, or of another dtype; `eps` or `offset` is no float.
        ValueError: `x` is a scalar or not on a GPU; `weight` is not (N,) or not on it; `eps` is negative; an unknown `casting`.

    Zhang and Sennrich 2019 (arXiv 1910.07467); Hugging Face's Llama and Gemma. Gradients leave out the rounding in between.
    """
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None and casting == "llama":
        return normed.to(x.dtype) * (weight + offset)
    return normed if weight is None else (normed * (weight + offset)).to(x.dtype)


def eager(x: Tensor, weight: Opt = None, eps: float | None = None, *, offset: float = 0, casting: Casting = "none") -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if casting == "none" and not offset:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    return by_hand(x, weight, eps, offset, casting, x.dtype)


def by_hand(x: Tensor, weight: Opt, eps: float, offset: float, casting: Casting, dtype: torch.dtype) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    if weight is not None and casting == "llama":
        return (weight + offset if offset else weight) * normed.to(dtype)
    return (normed if weight is None else normed * (weight.float() + offset)).to(dtype)


def check(x: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> None:
    check_rows("rms_norm", x, eps, weight=weight)


def check_rows(name: str, x: Tensor, eps: float | None, **vectors: Opt) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have one dimension or more, got a scalar")
    for argument, t in vectors.items():
        if t is not None and t.shape != x.shape[-1:]:
            raise ValueError(f"{name}: {argument} must have shape {tuple(x.shape[-1:])}, as x's last, got {tuple(t.shape)}")
    if eps is not None and not eps >= 0:
        raise ValueError(f"{name}: eps must be 0 or more, got {eps}")


# PyTorch 2.11 does not list F.rms_norm among the ops that autocast runs in float32; 2.13 does, on GPUs. The dispatcher knows.
AUTOCAST_TO_FLOAT32 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


def autocast(x: Tensor, weight: Opt, eps: float | None, offset: float, casting: Casting) -> Mapping[str, Any]:
    listed = AUTOCAST_TO_FLOAT32 and x.is_cuda and casting == "none"
    return {"x": x.float(), "weight": None if weight is None else weight.float()} if listed else {}


def empty_out(x: Tensor, weight: Opt = None, eps: float | None = None, offset: float = 0, casting: Casting = "none") -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and casting == "llama" else x.dtype
    return torch.empty_like(x, dtype=dtype)


def layer(*shape: int, eps: float = 1e-5, dtype: torch.dtype | None = None, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"x": draw(*shape), "weight": draw(shape[-1], dtype=dtype), "eps": eps, **options}


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield layer(1, 1, eps=1.0)(draw)  # With a small eps the gradient of a row of one element is all cancellation.
    for shape in [(3, 7), (2, 33), (31, 129), (3, 43, 6), (2, 1, 2, 3, 17), (9,)]:
        yield layer(*shape, eps=1e-6)(draw)
    yield layer(5, 1007, dtype=torch.float32, casting="llama")(draw)
    yield layer(33, 40, casting="llama", offset=0.5)(draw)
    yield layer(33, 2, 96, casting="gemma", offset=1.0)(draw)
    yield layer(127, 60, dtype=torch.float32)(draw)
    yield layer(60, 5, dtype=torch.bfloat16, eps=0.1, offset=-1.0)(draw)
    yield {"x": draw(2, 3, 100), "eps": 1e-6, "offset": 1.0, "casting": "gemma"}
    yield layer(3, 8200, casting="llama")(draw)
    yield layer(2, 33001, dtype=torch.float32)(draw)


def cost(x: Tensor, weight: Opt = None, eps: float | None = None, **options: Any) -> tuple[Cost, Cost]:
    out, scale = empty_out(x, weight, eps, **options).nbytes, 0 if weight is None else weight.nbytes
    return Cost(x.nbytes + out + scale, 4 * x.numel()), Cost(out + 2 * (x.nbytes + scale), 9 * x.numel())


workloads = {
    "llama-3.1-8b/prefill-8k": layer(8192, 4096, casting="llama"),
    "llama-3.1-8b/train-16k": layer(8, 2048, 4096, casting="llama"),
    "llama-3.1-8b/decode-64": layer(64, 4096, casting="llama"),
    "llama-3.1-70b/prefill-4k": layer(4096, 8192, casting="llama"),
    "llama-3.1-70b/decode-1": layer(1, 8192, casting="llama"),
    "qwen-3-8b/queries-8k": layer(2, 4096, 32, 128, eps=1e-6, casting="llama"),
    "qwen-3-8b/keys-decode-64": layer(64, 1, 8, 128, eps=1e-6, casting="llama"),
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
    extras={"rstd": lambda x, *_: x.new_empty(x.shape[0], dtype=torch.float32)},
    grads={"x": "x", "weight": "weight"},
    rows={"x": 1, "out": 1, "rstd": 0},
    eager=eager,
    autocast=autocast,
)

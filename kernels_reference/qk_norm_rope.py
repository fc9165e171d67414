"""Root mean square normalisation of each head of queries and keys, and their rotary position embedding."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import Cost, Draw, Op
from .rms_norm import Casting
from .rms_norm import eager as norm_eager
from .rope import check_heads, rope
from .rope import drawn as drawn_heads
from .rope import eager as rope_eager


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    offset: float = 0.0, casting: Casting = "none", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What attention does first in Qwen 3 and Gemma 3: `rope(rms_norm(q), rms_norm(k))`, each head normalised by itself.

    `normed = x / sqrt(mean(x**2) + eps) * (weight + offset)` over the last dimension, of size D; then
    `normed * cos + rotate(normed) * sin` of its first R elements, as `rope` has it. The others are normalised only.

    Args:
        q: (B, H, T, D) in any memory layout, also (B, T, H, D) seen as `q.transpose(1, 2)`; float32, float16 or bfloat16.
            The arithmetic is float32.
        k: (B, K, T, D) with the dtype of `q`, also with fewer heads.
        q_weight: (D,), in one of these dtypes, not necessarily that of `q`.
        k_weight: (D,), in the dtype of `q_weight`.
        cos: (T, R), (1, T, R) or (B, T, R), with R even and at most D, in any of these dtypes; see `rope`. It gets no gradient.
        sin: as `cos`, of the same shape.
        eps: added to the mean square.
        offset: added to the weights, in float32. It is 1.0 for Gemma 3, which stores them less 1.
        casting: "none" and "gemma" round the result alone. "llama", as `Qwen3RMSNorm`, also rounds what is normalised, to the
            dtype of `q`, before it is multiplied by the weight.
        interleaved: how elements are paired, as in `rope`.

    Returns:
        The turned `q` and `k`, in their dtype whatever `casting` is, rounded once after the rotation, and each in its own
        memory layout.

    Raises:
        TypeError: an argument is of another type or dtype; the dtypes of `q` and `k`, or of the weights, differ.
        ValueError: shapes do not fit together, R is odd, 0 or above D; `eps` is negative; an unknown `casting`; a tensor is not
            on the GPU of the others; `cos` or `sin` requires grad.

    As `Qwen3Attention` and `Gemma3Attention` of Hugging Face, which round after each step: the norm, and each product of the
    rotation. Gradients leave out the rounding in between. One pass over `q` and `k` instead of two, forward and backward.
    """

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (y.to(x.dtype) if casting == "llama" else y) * (weight + offset)

    q_out, k_out = rope(normed(q, q_weight), normed(k, k_weight), cos, sin, interleaved=interleaved)
    return q_out.to(q.dtype), k_out.to(k.dtype)


def eager(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6, *,
    offset: float = 0.0, casting: Casting = "none", interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_normed = norm_eager(q, q_weight, eps, offset=offset, casting=casting).to(q.dtype)
    k_normed = norm_eager(k, k_weight, eps, offset=offset, casting=casting).to(k.dtype)
    return rope_eager(q_normed, k_normed, cos, sin, interleaved=interleaved)


def check(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *_: Any) -> None:
    check_heads("qk_norm_rope", q, k, cos, sin)
    for name, t in (("q_weight", q_weight), ("k_weight", k_weight)):
        if t.shape != q.shape[-1:]:
            raise ValueError(f"qk_norm_rope: {name} must have shape {tuple(q.shape[-1:])}, as q's last, got {tuple(t.shape)}")
    if k_weight.dtype != q_weight.dtype:
        raise TypeError(f"qk_norm_rope: k_weight must have the dtype of q_weight, {q_weight.dtype}, got {k_weight.dtype}")
    if not eps >= 0:
        raise ValueError(f"qk_norm_rope: eps must be 0 or more, got {eps}")


def heads(
    B: int, H: int, K: int, T: int, D: int, *, weights: torch.dtype | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting: Casting = "none", **options: Any,
) -> Callable[[Draw], dict[str, Any]]:  # fmt: skip
    """Other options are those of rope's."""

    def drawn(draw: Draw) -> dict[str, Any]:
        q_weight, k_weight = draw(D, dtype=weights), draw(D, dtype=weights)
        others = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "offset": offset, "casting": casting}
        return {**drawn_heads(draw, B, H, K, T, D, **options), **others}

    return drawn


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield heads(1, 1, 1, 1, 2, eps=1.0)(draw)  # With a small eps the gradient of so few elements is all cancellation.
    yield heads(2, 4, 2, 5, 8)(draw)
    yield heads(2, 9, 3, 7, 96, tables=(2,), dtype=torch.float32, weights=torch.float32, casting="llama")(draw)
    yield heads(2, 3, 2, 33, 60, R=30, tables=(1,), interleaved=True, casting="gemma", offset=1.0)(draw)
    yield heads(2, 2, 2, 65, 100, dtype=torch.bfloat16, inside=True, interleaved=True, casting="llama", offset=0.5)(draw)
    yield heads(2, 8, 1, 3, 40, R=16, tables=(2,), inside=True, casting="llama")(draw)
    yield heads(2, 3, 2, 47, 7, R=4, interleaved=True, weights=torch.bfloat16)(draw)
    yield heads(1, 2, 2, 1, 1100, R=1000, eps=0.1)(draw)


def cost(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *_: Any, **options: Any
) -> tuple[Cost, Cost]:
    both, tables, weights = q.nbytes + k.nbytes, cos.nbytes + sin.nbytes, q_weight.nbytes + k_weight.nbytes
    n = q.numel() + k.numel()
    turned = 3 * n // q.shape[-1] * cos.shape[-1]
    return Cost(2 * both + tables + weights, 4 * n + turned), Cost(3 * both + tables + 2 * weights, 9 * n + turned)


# As in the models: heads inside positions, tables in the dtype of the activations for a batch of one.
def model(*sizes: int, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return heads(*sizes, tables=(1,), inside=True, paired=True, **options)


workloads = {
    "qwen-3-8b/prefill-4k": model(2, 32, 8, 4096, 128, casting="llama"),
    "qwen-3-8b/decode-64": model(64, 32, 8, 1, 128, casting="llama"),
    "qwen-3-32b/train-2k": model(8, 64, 8, 2048, 128, casting="llama"),
    "gemma-3-27b/prefill-4k": model(2, 32, 16, 4096, 128, offset=1.0, casting="gemma"),
    "gemma-3-4b/prefill-8k": model(1, 8, 4, 8192, 256, offset=1.0, casting="gemma"),
    "odd-1000": model(4, 9, 3, 1000, 96, R=48),
}


op = Op(
    fn=qk_norm_rope,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"q_out": lambda q, *_: torch.empty_like(q), "k_out": lambda q, k, *_: torch.empty_like(k)},
    grads={"q": "q", "k": "k", "q_weight": "q_weight", "k_weight": "k_weight"},
    eager=eager,
    # The rotation's two products may cancel.
    slack={torch.float32: 16},
)

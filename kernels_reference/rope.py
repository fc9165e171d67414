"""Rotary position embedding of queries and keys."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import Cost, Draw, Op


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding: `x * cos + rotate(x) * sin` of the first R elements of each head; the others pass through.

    In the half layout (Llama) `rotate(x) = cat(-x[R/2:], x[:R/2])`: elements i and i + R/2 are a pair. In the interleaved
    layout (GPT-J) `rotate(x)[2i] = -x[2i+1]` and `rotate(x)[2i+1] = x[2i]`: elements 2i and 2i + 1 are a pair.

    Args:
        q: (B, H, T, D) in any memory layout, also (B, T, H, D) seen as `q.transpose(1, 2)`; float32, float16 or bfloat16.
            The arithmetic is float32.
        k: (B, K, T, D) with the dtype of `q`, also with fewer heads.
        cos: (T, R), (1, T, R) or (B, T, R), with R even and at most D, in any of these dtypes. Each element takes its own:
            `cos[i]` and `cos[i + R/2]` belong to pair i, interleaved `cos[2i]` and `cos[2i+1]`. For a rotation they are
            equal, which is not required. It gets no gradient.
        sin: as `cos`, of the same shape.
        interleaved: how elements are paired.

    Returns:
        The rotated `q` and `k`, in their dtype, rounded once, and each in its own memory layout.

    Raises:
        TypeError: an argument is of another type or dtype; the dtypes of `q` and `k` differ.
        ValueError: shapes do not fit together, R is odd, 0 or above D; a tensor is not on the GPU of the others; `cos` or
            `sin` requires grad.

    As `apply_rotary_pos_emb` of Hugging Face's Llama, and interleaved of its GPT-J; Su et al. 2021 (arXiv 2104.09864).
    """
    R = cos.shape[-1]
    cos, sin = (t.unsqueeze(-3) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        turning, passing = x[..., :R], x[..., R:]
        if interleaved:
            partners = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
        else:
            partners = torch.cat((-turning[..., R // 2 :], turning[..., : R // 2]), dim=-1)
        turned = (turning * cos + partners * sin).to(x.dtype)
        return torch.cat((turned, passing), dim=-1) if passing.shape[-1] else turned

    return rotated(q), rotated(k)


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    return rope(q, k, cos.to(q.dtype), sin.to(q.dtype), interleaved=interleaved)


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    check_heads("rope", q, k, cos, sin)


def check_heads(name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if q.ndim != 4:
        raise ValueError(f"{name}: q must have shape (B, H, T, D), got {tuple(q.shape)}")
    B, _, T, D = q.shape
    if k.ndim != 4 or k.shape[0] != B or k.shape[2] != T or k.shape[3] != D:
        raise ValueError(f"{name}: k must have shape ({B}, K, {T}, {D}) for q of shape {tuple(q.shape)}, got {tuple(k.shape)}")
    if k.dtype != q.dtype:
        raise TypeError(f"{name}: k must have the dtype of q, {q.dtype}, got {k.dtype}")
    if cos.ndim not in (2, 3) or cos.shape[-2] != T or (cos.ndim == 3 and cos.shape[0] not in (1, B)):
        takes = f"({T}, R), (1, {T}, R) or ({B}, {T}, R) for q of shape {tuple(q.shape)}"
        raise ValueError(f"{name}: cos must have shape {takes}, got {tuple(cos.shape)}")
    if cos.shape[-1] % 2 or not 2 <= cos.shape[-1] <= D:
        raise ValueError(f"{name}: cos must have an even last dimension from 2 to {D}, got {cos.shape[-1]}")
    if sin.shape != cos.shape:
        raise ValueError(f"{name}: sin must have the shape of cos, {tuple(cos.shape)}, got {tuple(sin.shape)}")


def drawn(
    draw: Draw, B: int, H: int, K: int, T: int, D: int, *, R: int = 0, tables: tuple[int, ...] = (), **options: Any
) -> dict[str, Any]:
    """Tables have shape (*tables, T, R). With `inside`, heads lie inside positions: (B, T, H, D) in memory.

    With `paired`, as in models, both elements of a pair are turned by the same angle.
    """
    inside, dtype = options.pop("inside", False), options.pop("dtype", None)
    q, k = (draw(B, T, n, D).transpose(1, 2) if inside else draw(B, n, T, D) for n in (H, K))
    paired, interleaved = options.pop("paired", False), options.get("interleaved", False)
    # Random tables show a kernel that takes both elements of a pair to have the same angle.
    cos, sin = (draw(*tables, T, (R or D) // (1 + paired), dtype=dtype) for _ in range(2))
    if paired:
        cos, sin = (t.repeat_interleave(2, -1) if interleaved else torch.cat([t, t], -1) for t in (cos, sin))
    return {"q": q, "k": k, "cos": cos, "sin": sin, **options}


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield drawn(draw, 1, 1, 1, 1, 2)
    yield drawn(draw, 2, 4, 2, 5, 8)
    yield drawn(draw, 2, 9, 3, 7, 96, tables=(2,), dtype=torch.float32)
    yield drawn(draw, 2, 3, 2, 33, 60, R=30, tables=(1,), interleaved=True)
    yield drawn(draw, 1, 2, 1, 129, 100, dtype=torch.bfloat16, inside=True, interleaved=True)
    yield drawn(draw, 2, 8, 2, 3, 40, R=16, tables=(2,), inside=True)
    yield drawn(draw, 1, 3, 2, 1007, 7, R=4, interleaved=True)
    yield drawn(draw, 1, 1, 2, 1, 2700, R=2600)


def cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Cost, Cost]:
    turned = (q.numel() + k.numel()) // q.shape[-1] * cos.shape[-1]
    both = Cost(2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes, 3 * turned)
    return both, both


def model(*sizes: int, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: drawn(draw, *sizes, paired=True, **options)


workloads = {
    # Hugging Face's models have heads inside positions, and tables in the dtype of the activations for a batch of one.
    "llama-3.1-8b/prefill-4k": model(2, 32, 8, 4096, 128, tables=(1,)),
    "llama-3.1-8b/train-2k": model(8, 32, 8, 2048, 128, tables=(1,), inside=True),
    "llama-3.1-70b/train-2k": model(8, 64, 8, 2048, 128, tables=(1,), inside=True),
    "qwen-3-8b/decode-64": model(64, 32, 8, 1, 128, tables=(64,)),
    "qwen-3-8b/packed-4k": model(2, 32, 8, 4096, 128, tables=(2,), dtype=torch.float32),
    "gemma-3-27b/prefill-4k": model(2, 32, 16, 4096, 128, dtype=torch.float32, inside=True),
    "mistral-7b/decode-1": model(1, 32, 8, 1, 128, tables=(1,)),
    "glm-4-9b/prefill-4k": model(2, 32, 2, 4096, 128, R=64, tables=(1,), interleaved=True),
    "gpt-j-6b/train-2k": model(8, 16, 16, 2048, 256, R=64, tables=(1,), inside=True, interleaved=True),
    "phi-3-mini/odd-1000": model(4, 32, 32, 1000, 96, tables=(1,)),
}


op = Op(
    fn=rope,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={
        "q_out": lambda q, k, cos, sin, interleaved: torch.empty_like(q),
        "k_out": lambda q, k, cos, sin, interleaved: torch.empty_like(k),
    },
    grads={"q": "grad_q_out", "k": "grad_k_out"},
    eager=eager,
)

"""Rotary position embedding: one launch; a program reads its angles once and turns a group of queries' and keys' heads."""

from typing import Any

import helion.language as hl
import torch
from helion import cdiv
from torch import Tensor

from kernels_reference.rope import op

from ._kernel import kernel, next_power_of_2


def blocks(q: Tensor, k: Tensor, half: int, width: int, interleaved: bool) -> tuple[int, int, int]:
    """A tile is 2048 elements of rows that lie together in memory: heads of a position or positions of a head."""
    d = min(next_power_of_2(width), max(next_power_of_2(half) * (1 + interleaved), 64), 1024)
    rows, t, h = 1024 * (1 + interleaved) // d, next_power_of_2(q.size(2)), next_power_of_2(max(q.size(1), k.size(1)))
    h = min(rows if q.stride(1) < q.stride(2) else rows // min(rows, t), h)
    return d, min(rows // h, t), h


def config(q: Tensor, k: Tensor, *rest: Any) -> dict[str, Any]:
    *_, (_, H, K, half, width, _), ((interleaved, _),) = rest
    d, t, h = blocks(q, k, half, width, interleaved)
    return {"block_sizes": [d, t, h if H else 1, h if K else 1], "num_warps": max(d * t * h * (2 - interleaved) // 512, 1)}


def sizes(q: Tensor, k: Tensor, *rest: Any) -> dict[str, int]:
    (B, H, T, D), ((interleaved, _),) = q.shape, rest[-1]
    together = q.stride(1) < q.stride(2)
    return {
        "M": B * T,
        "H": H,
        "K": k.size(1),
        "D": D,
        "together": together,
        "interleaved": interleaved,
        "itemsize": q.itemsize,
    }


Lanes = list[tuple[Tensor, Tensor]]
"""Elements of a row and masks of them: of pairs' firsts and seconds or, interleaved, of pairs; then of what is not turned."""


def lanes_of(d: Any, half: int, interleaved: bool, rest: int, width: int, D: int) -> Lanes:
    at = d.index
    mask = at < half * (1 + interleaved)
    pairs = [(at, mask)] if interleaved else [(at, mask), (at + half, mask)]
    others = [at + (half * 2 + i * width) for i in range(rest)]
    return [*pairs, *[(other, other < D) for other in others]]


def load_pairs(x: Tensor, rows: list[Any], lanes: Lanes, interleaved: bool) -> tuple[Tensor, Tensor]:
    parts = [hl.load(x, [*rows, at], mask).float() for at, mask in lanes[: 2 - interleaved]]
    if interleaved:
        return hl.split(parts[0].reshape([*parts[0].shape[:-1], parts[0].shape[-1] // 2, 2]))
    return tuple(parts)  # type: ignore


def store_pairs(out: Tensor, rows: list[Any], d: Any, lanes: Lanes, interleaved: bool, x1: Tensor, x2: Tensor) -> None:
    parts = [x1.to(out.dtype), x2.to(out.dtype)]
    if interleaved:
        parts = [hl.join(*parts).reshape([*x1.shape[:-1], d.block_size])]
    for (at, mask), part in zip(lanes, parts):  # noqa: B905 (the rest are not of pairs)
        hl.store(out, [*rows, at], part, mask)


def turn(x: Tensor, out: Tensor, rows: list[Any], d: Any, lanes: Lanes, angles: Any, interleaved: bool) -> None:
    (cos1, cos2), (sin1, sin2) = angles
    x1, x2 = load_pairs(x, rows, lanes, interleaved)
    store_pairs(out, rows, d, lanes, interleaved, x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)
    for at, mask in lanes[2 - interleaved :]:
        hl.store(out, [*rows, at], hl.load(x, [*rows, at], mask), mask)


@kernel(config, sizes)
def rope_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, sizes: Any, options: Any) -> None:
    (G, H, K, half, width, backward), (interleaved, partial) = sizes, options
    for g, b, d, t in hl.tile([G, q.size(0), width, q.size(2)], block_size=[1, 1, None, None]):
        lanes = lanes_of(d, half, interleaved, partial * (2 - interleaved), width, q.size(3))
        cos1, cos2 = load_pairs(cos, [b.begin, t], lanes, interleaved)
        sin1, sin2 = load_pairs(sin, [b.begin, t], lanes, interleaved)
        if backward:
            sin1, sin2 = -sin2, -sin1
        for h in hl.tile(g.begin * H, min(g.begin * H + H, q.size(1))):
            turn(q, q_out, [b.begin, h, t], d, lanes, ((cos1, cos2), (sin1, sin2)), interleaved)
        for h in hl.tile(g.begin * K, min(g.begin * K + K, k.size(1))):
            turn(k, k_out, [b.begin, h, t], d, lanes, ((cos1, cos2), (sin1, sin2)), interleaved)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, needs: Any, backward: bool) -> Any:
    (B, H, T, D), K, R = q.shape, k.size(1), cos.size(-1)
    width = max(R, D - R) if interleaved else max(R, D - R + 1) // 2
    d, t, h = blocks(q, k, R // 2, width, interleaved)
    # As many heads to a program, for each set of angles, as leave 2048 programs.
    G = min(cdiv(max(H, K), h), max(2048 // (B * cdiv(T, t) * cdiv(width, d)), 1))
    q_needs, k_needs = needs
    q_out, k_out = torch.empty_like(q) if q_needs else q, torch.empty_like(k) if k_needs else k
    sizes = (G, cdiv(H, G * h) * h * q_needs, cdiv(K, G * h) * h * k_needs, R // 2, width, int(backward))
    rope_kernel(q, k, cos.expand(B, -1, -1), sin.expand(B, -1, -1), q_out, k_out, sizes, hl.constexpr((interleaved, R < D)))
    return q_out, k_out


def rope_fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return turned(q, k, cos, sin, interleaved, (True, True), False)


def rope_bwd(grad_q_out: Tensor, grad_k_out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, needs: list[bool]) -> Any:
    return turned(grad_q_out, grad_k_out, cos, sin, interleaved, needs, True)


rope = op.implement(rope_fwd, rope_bwd)

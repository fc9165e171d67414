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


def masked(lanes: Tensor, live: Tensor | None) -> Tensor:
    return lanes if live is None else live & lanes


def load_pairs(
    x: Tensor, rows: list[Any], d: Any, half: int, interleaved: bool, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if interleaved:
        tile = hl.load(x, [*rows, d], masked(d.index < half * 2, live)).float()
        return hl.split(tile.reshape([*tile.shape[:-1], tile.shape[-1] // 2, 2]))
    return tuple(hl.load(x, [*rows, at], masked(d.index < half, live)).float() for at in (d.index, d.index + half))  # type: ignore


def store_pairs(
    out: Tensor, rows: list[Any], d: Any, half: int, interleaved: bool, x1: Tensor, x2: Tensor, live: Tensor | None = None
) -> None:
    x1, x2 = x1.to(out.dtype), x2.to(out.dtype)
    if interleaved:
        hl.store(out, [*rows, d], hl.join(x1, x2).reshape([*x1.shape[:-1], d.block_size]), masked(d.index < half * 2, live))
    else:
        hl.store(out, [*rows, d.index], x1, masked(d.index < half, live))
        hl.store(out, [*rows, d.index + half], x2, masked(d.index < half, live))


def turn(x: Tensor, out: Tensor, rows: list[Any], d: Any, angles: Any, sizes: Any, options: Any) -> None:
    (cos1, cos2, sin1, sin2), (*_, half, width, _), (interleaved, partial) = angles, sizes, options
    # In place of an end of the loop over heads that depends on their number, which Helion takes long to reason about.
    live = (rows[1].index < x.size(1)).unsqueeze(1).unsqueeze(2)
    x1, x2 = load_pairs(x, rows, d, half, interleaved, live)
    store_pairs(out, rows, d, half, interleaved, x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, live)
    for at in [d.index + half * 2, d.index + half * 2 + width][: partial * (2 - interleaved)]:
        hl.store(out, [*rows, at], hl.load(x, [*rows, at], live & (at < x.size(-1))), live & (at < x.size(-1)))


@kernel(config, sizes)
def rope_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, sizes: Any, options: Any) -> None:
    G, H, K, half, width, backward = sizes
    for g, b, d, t in hl.tile([G, q.size(0), width, q.size(2)], block_size=[1, 1, None, None]):
        cos1, cos2 = load_pairs(cos, [b.begin, t], d, half, options[0])
        sin1, sin2 = load_pairs(sin, [b.begin, t], d, half, options[0])
        if backward:
            sin1, sin2 = -sin2, -sin1
        for h in hl.tile(g.begin * H, g.begin * H + H):
            turn(q, q_out, [b.begin, h, t], d, (cos1, cos2, sin1, sin2), sizes, options)
        for h in hl.tile(g.begin * K, g.begin * K + K):
            turn(k, k_out, [b.begin, h, t], d, (cos1, cos2, sin1, sin2), sizes, options)


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

"""Rotary position embedding: one launch; a program reads its angles once and turns a group of queries' and keys' heads."""

from collections.abc import Sequence
from math import gcd
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference.rope import op

from ._kernel import kernel, next_power_of_2


def config(q: Tensor, *rest: Any) -> dict[str, Any]:
    """A tile is 2048 elements of rows that lie together in memory: heads of a position or positions of a head."""
    *_, (H, K, half, width, _), ((interleaved, _),) = rest
    d = min(next_power_of_2(width), max(next_power_of_2(half) * (1 + interleaved), 64), 1024)
    rows, most_t, most_h = 1024 * (1 + interleaved) // d, next_power_of_2(q.size(3)), next_power_of_2(max(H, K))
    h = min(rows if q.stride(2) < q.stride(3) else rows // min(rows, most_t), most_h)
    t = min(rows // h, most_t)
    return {"block_sizes": [d, t, h if H else 1, h if K else 1], "num_warps": max(4 * h * t // rows, 1)}


def load_pairs(x: Tensor, rows: list[Any], d: Any, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        tile = hl.load(x, [*rows, d], d.index < half * 2).float()
        return hl.split(tile.reshape([*tile.shape[:-1], tile.shape[-1] // 2, 2]))
    return tuple(hl.load(x, [*rows, at], d.index < half).float() for at in (d.index, d.index + half))  # type: ignore


def turn(x: Tensor, out: Tensor, rows: list[Any], d: Any, angles: Sequence[Tensor], sizes: Any, options: Any) -> None:
    (cos1, cos2, sin1, sin2), (_, _, half, width, _), (interleaved, partial) = angles, sizes, options
    x1, x2 = load_pairs(x, rows, d, half, interleaved)
    y1, y2 = (x1 * cos1 - x2 * sin1).to(out.dtype), (x2 * cos2 + x1 * sin2).to(out.dtype)
    if interleaved:
        hl.store(out, [*rows, d], hl.join(y1, y2).reshape([*y1.shape[:-1], d.block_size]), d.index < half * 2)
    else:
        hl.store(out, [*rows, d.index], y1, d.index < half)
        hl.store(out, [*rows, d.index + half], y2, d.index < half)
    for at in [d.index + half * 2, d.index + half * 2 + width][: partial * (2 - interleaved)]:
        hl.store(out, [*rows, at], hl.load(x, [*rows, at], at < x.size(-1)), at < x.size(-1))


@kernel(config)
def rope_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, sizes: Any, options: Any) -> None:
    H, K, half, width, backward = sizes
    for g, b, d, t in hl.tile([q.size(1), q.size(0), width, q.size(3)], block_size=[1, 1, None, None]):
        cos1, cos2 = load_pairs(cos, [b.begin, t], d, half, options[0])
        sin1, sin2 = load_pairs(sin, [b.begin, t], d, half, options[0])
        if backward:
            sin1, sin2 = -sin2, -sin1
        for h in hl.tile(H):
            turn(q, q_out, [b.begin, g.begin, h, t], d, (cos1, cos2, sin1, sin2), sizes, options)
        for h in hl.tile(K):
            turn(k, k_out, [b.begin, g.begin, h, t], d, (cos1, cos2, sin1, sin2), sizes, options)


def rope_fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, needs: Any = None) -> tuple[Tensor, Tensor]:
    (B, _, T, D), R = q.shape, cos.size(-1)
    width = max(R, D - R) if interleaved else max(R, D - R + 1) // 2
    # Heads are split into groups, each a program, where positions alone are too few to fill the GPU.
    tiles = B * T if q.stride(1) < q.stride(2) else max(B * T * R // 2048, 1)
    G = gcd(q.size(1), k.size(1), next_power_of_2(max(2048 // tiles, 1)))
    needs_q, needs_k = needs or (True, True)
    q_out, k_out = torch.empty_like(q) if needs_q else q, torch.empty_like(k) if needs_k else k
    x, y, x_out, y_out = (each.unflatten(1, (G, -1)) for each in (q, k, q_out, k_out))
    sizes = (x.size(2) * needs_q, y.size(2) * needs_k, R // 2, width, int(needs is not None))
    rope_kernel(x, y, cos.expand(B, -1, -1), sin.expand(B, -1, -1), x_out, y_out, sizes, hl.constexpr((interleaved, R < D)))
    return q_out, k_out


def rope_bwd(grad_q_out: Tensor, grad_k_out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, needs: list[bool]) -> Any:
    return rope_fwd(grad_q_out, grad_k_out, cos, sin, interleaved, needs)


rope = op.implement(rope_fwd, rope_bwd)

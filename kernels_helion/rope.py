"""Rotary position embedding: one launch for queries and keys; a program reads its angles once and turns a group of heads."""

from collections.abc import Sequence
from math import gcd
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference.rope import op

from ._kernel import kernel, next_power_of_2


def blocks(q: Tensor, k: Tensor, R: int) -> tuple[int, int, int, int]:
    """Positions, pairs, heads and elements that pass through, in a tile of 2048 elements of rows that lie together."""
    *_, T, D = q.shape
    heads, positions, pairs = (next_power_of_2(n) for n in (max(q.size(-3), k.size(-3)), T, R // 2))
    pairs = min(pairs, 1024)
    rest = min(next_power_of_2(max(D - R, 1)), max(pairs * 2, 128))
    rows = 2048 // max(pairs * 2, rest)
    heads = min(rows, heads) if q.stride(-3) < q.stride(-2) else min(rows // min(rows, positions), heads)
    return min(rows // heads, positions), pairs, heads, rest


def config(q: Tensor, k: Tensor, cos: Tensor, *_: Any, step: int = 1) -> dict[str, Any]:
    t, d, h, rest = blocks(q, k, cos.size(-1))
    return {"block_sizes": [t, d * step, h, rest, h, rest], "num_warps": 4}


def halves(x: Tensor, rows: Sequence[Any], d: Any, half: int) -> tuple[Tensor, Tensor]:
    return hl.load(x, [*rows, d]).float(), hl.load(x, [*rows, d.index + half]).float()


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return hl.split(x.float().reshape([*x.shape[:-1], x.shape[-1] // 2, 2]))


@kernel(config)
def rope_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, backward: bool) -> None:
    B, G, H, T, D = q.size()
    K, R = k.size(2), cos.size(2)
    half = R // 2
    for b, g, t in hl.tile([B, G, T], block_size=[1, 1, None]):
        for d in hl.tile(half):
            cos1, cos2 = halves(cos, [b.begin, t], d, half)
            sin1, sin2 = halves(sin, [b.begin, t], d, half)
            if backward:
                sin1, sin2 = -sin2, -sin1
            for h in hl.tile(H):
                x1, x2 = halves(q, [b.begin, g.begin, h, t], d, half)
                q_out[b.begin, g.begin, h, t, d] = (x1 * cos1 - x2 * sin1).to(q_out.dtype)
                q_out[b.begin, g.begin, h, t, d.index + half] = (x2 * cos2 + x1 * sin2).to(q_out.dtype)
                for rest in hl.tile(R, D):
                    q_out[b.begin, g.begin, h, t, rest] = q[b.begin, g.begin, h, t, rest]
            for h in hl.tile(K):
                x1, x2 = halves(k, [b.begin, g.begin, h, t], d, half)
                k_out[b.begin, g.begin, h, t, d] = (x1 * cos1 - x2 * sin1).to(k_out.dtype)
                k_out[b.begin, g.begin, h, t, d.index + half] = (x2 * cos2 + x1 * sin2).to(k_out.dtype)
                for rest in hl.tile(R, D):
                    k_out[b.begin, g.begin, h, t, rest] = k[b.begin, g.begin, h, t, rest]


@kernel(lambda *args: config(*args, step=2))
def rope_interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, backward: bool) -> None:
    B, G, H, T, D = q.size()
    K, R = k.size(2), cos.size(2)
    for b, g, t in hl.tile([B, G, T], block_size=[1, 1, None]):
        for d in hl.tile(R):
            cos1, cos2 = pairs(cos[b.begin, t, d])
            sin1, sin2 = pairs(sin[b.begin, t, d])
            if backward:
                sin1, sin2 = -sin2, -sin1
            for h in hl.tile(H):
                x = q[b.begin, g.begin, h, t, d]
                x1, x2 = pairs(x)
                turned = hl.join(x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2).reshape(x.shape)
                q_out[b.begin, g.begin, h, t, d] = turned.to(q_out.dtype)
                for rest in hl.tile(R, D):
                    q_out[b.begin, g.begin, h, t, rest] = q[b.begin, g.begin, h, t, rest]
            for h in hl.tile(K):
                x = k[b.begin, g.begin, h, t, d]
                x1, x2 = pairs(x)
                turned = hl.join(x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2).reshape(x.shape)
                k_out[b.begin, g.begin, h, t, d] = turned.to(k_out.dtype)
                for rest in hl.tile(R, D):
                    k_out[b.begin, g.begin, h, t, rest] = k[b.begin, g.begin, h, t, rest]


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backward: bool) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    groups = 2048 // (B * -(-T // blocks(q, k, cos.size(-1))[0]))
    G = gcd(H, k.size(1), next_power_of_2(max(groups, 1)))
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    x, y, x_out, y_out = (z.unflatten(1, (G, -1)) for z in (q, k, q_out, k_out))
    launch = rope_interleaved if interleaved else rope_half
    launch(x, y, cos.expand(B, -1, -1), sin.expand(B, -1, -1), x_out, y_out, backward)
    return q_out, k_out


def rope_fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return rotate(q, k, cos, sin, interleaved, backward=False)


def rope_bwd(
    grad_q_out: Tensor, grad_k_out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    return rotate(grad_q_out, grad_k_out, cos, sin, interleaved, backward=True)


rope = op.implement(rope_fwd, rope_bwd)

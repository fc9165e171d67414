"""RMS norm of each head of queries and keys, then rotary embedding: one kernel, launched for queries and for keys.

A tile has some heads of some positions. Backward, a program has a run of positions, and one sum for the weight's gradient.
"""

from typing import Any

import helion.language as hl
import torch
from helion import cdiv
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference.qk_norm_rope import Casting, op

from ._kernel import kernel, next_power_of_2
from .rope import Lanes, lanes_of, load_pairs, store_pairs

Opt = Tensor | None


def config(x: Tensor, *rest: Any) -> dict[str, Any]:
    """A tile has 4096 elements of heads, positions and pairs or, interleaved, elements; the same for queries and keys."""
    (*_, width), ((interleaved, *_, few),) = rest[-2:]
    d = next_power_of_2(width)
    rows = max(2048 * (1 + interleaved) // d, 1)
    h = min(few, rows)
    t = min(rows // h, next_power_of_2(x.size(2)))
    return {"block_sizes": [h, t, d], "num_warps": min(max(t * h * d * (2 - interleaved) // 512, 1), 16)}


def sizes(x: Tensor, *rest: Any) -> dict[str, int]:
    (_, _, M, N, _), ((interleaved, *_),) = rest[-2:]
    together, D = x.stride(1) < x.stride(2), x.size(3)
    return {"M": M, "H": N // M, "D": D, "itemsize": x.itemsize, "together": together, "interleaved": interleaved}


def load(x: Tensor, rows: list[Any], lanes: Lanes, options: Any) -> list[Tensor]:
    """Elements one and two of the pairs, and what is not turned, where there is any."""
    rest = [hl.load(x, [*rows, at], mask).float() for at, mask in lanes[2 - options[0] :]]
    return [*load_pairs(x, rows, lanes, options[0]), *rest]


def store(out: Tensor, rows: list[Any], d: Any, lanes: Lanes, options: Any, parts: list[Tensor]) -> None:
    store_pairs(out, rows, d, lanes, options[0], parts[0], parts[1])
    for (at, mask), part in zip(lanes[2 - options[0] :], parts[2:]):  # noqa: B905 (there may be one that is for no lanes)
        hl.store(out, [*rows, at], part.to(out.dtype), mask)


def lanes_with(d: Any, options: Any) -> Lanes:
    interleaved, half, passing, *_ = options
    return lanes_of(d, half, interleaved, int(passing > 0), 0, half * 2 + passing)


def row_means(some: list[Tensor], others: list[Tensor], options: Any) -> Tensor:
    """Of their products, one for each row."""
    sums: Any = sum((a * b).sum(dim=-1) for a, b in zip(some, others, strict=True))
    return sums.unsqueeze(-1) / (options[1] * 2 + options[2])


def turned(x: list[Tensor], cos: Any, sin: Any) -> list[Tensor]:
    return [x[0] * cos[0] - x[1] * sin[0], x[1] * cos[1] + x[0] * sin[1], *x[2:]]


def forward(x, weight, cos, sin, out, rows: list[Any], d: Any, numbers: Any, options: Any) -> None:
    lanes = lanes_with(d, options)
    value, scales, (eps, offset, *_) = load(x, rows, lanes, options), load(weight, [], lanes, options), numbers
    angles = [load_pairs(table, rows, lanes, options[0]) for table in (cos, sin)]
    rstd = torch.rsqrt(row_means(value, value, options) + eps)
    normed = [(part * rstd).to(options[3]).float() * (scale + offset) for part, scale in zip(value, scales, strict=True)]
    store(out, rows, d, lanes, options, turned(normed, *angles))


def backward(
    x, scales, cos, sin, grad, grad_x, rows: list[Any], d: Any, lanes: Lanes, numbers: Any, options: Any
) -> list[Tensor]:
    """Writes to grad_x; what the rows add to the gradient of the weight."""
    eps, offset, M, N, _ = numbers
    value, incoming = load(x, rows, lanes, options), load(grad, rows, lanes, options)
    (cos1, cos2), (sin1, sin2) = (load_pairs(table, rows, lanes, options[0]) for table in (cos, sin))
    # Lanes without a row would make the sums NaN where eps is 0.
    live = (rows[1].index < N // M).unsqueeze(1) & (rows[2].index < x.size(2)).unsqueeze(0)
    rstd = torch.where(live.unsqueeze(2), torch.rsqrt(row_means(value, value, options) + eps), 0)
    normed, grads = [part * rstd for part in value], turned(incoming, (cos1, cos2), (-sin2, -sin1))
    if grad_x is not None:
        inner = [part * (scale + offset) for part, scale in zip(grads, scales, strict=True)]
        dots = row_means(inner, normed, options)
        store(grad_x, rows, d, lanes, options, [(g - part * dots) * rstd for g, part in zip(inner, normed, strict=True)])
    return [part * other for part, other in zip(grads, normed, strict=True)]


@kernel(config, sizes)
def qk_norm_rope_fwd_kernel(x, weight, cos, sin, out, numbers: Any, options: Any) -> None:
    _, _, M, N, width = numbers
    for h, b, t, d in hl.tile([N // M, M // x.size(2), x.size(2), width], block_size=[None, 1, None, None]):
        forward(x, weight, cos, sin, out, [b.begin, h, t], d, numbers, options)


@kernel(config, sizes)
def qk_norm_rope_bwd_kernel(x, weight, cos, sin, grad, grad_x, sums, run: int, numbers: Any, options: Any) -> None:
    _, _, M, N, width = numbers
    heads, step = hl.register_block_size(N // M), hl.register_block_size(x.size(2))
    for h, b, part, d in hl.tile([N // M, M // x.size(2), -(-x.size(2) // run), width], block_size=[heads, 1, 1, None]):
        lanes = lanes_with(d, options)
        scales = load(weight, [], lanes, options)
        first = hl.zeros([h, step, d.block_size // (1 + options[0])])
        second = hl.zeros([h, step, d.block_size // (1 + options[0])])
        rest = hl.zeros([h, step, d])
        for t in hl.tile(part.begin * run, min(part.begin * run + run, x.size(2)), block_size=step):
            adds = backward(x, scales, cos, sin, grad, grad_x, [b.begin, h, t], d, lanes, numbers, options)
            first = first + adds[0]
            second = second + adds[1]
            if options[2]:
                rest = rest + adds[2]
        if sums is not None:
            row = (h.id * (M // x.size(2)) + b.begin) * (-(-x.size(2) // run)) + part.begin
            totals = [first.sum(dim=0).sum(dim=0), second.sum(dim=0).sum(dim=0), rest.sum(dim=0).sum(dim=0)]
            store(sums, [row], d, lanes, options, totals)


@kernel(lambda *_: {"block_sizes": [16, 128], "num_warps": 4}, lambda sums, *_: {"D": sums.size(1)})
def qk_norm_rope_sum_kernel(sums: Tensor, queries: int, grad_q_weight: Opt, grad_k_weight: Opt) -> None:
    """The first of the sums are those for queries."""
    for keys, cols in hl.tile([2, sums.size(1)], block_size=[1, None]):
        total = hl.zeros([cols])
        for rows in hl.tile(keys.begin * queries, queries + keys.begin * (sums.size(0) - queries)):
            total = total + sums[rows, cols].sum(dim=0)
        if grad_q_weight is not None:
            hl.store(grad_q_weight, [cols], total.to(grad_q_weight.dtype), extra_mask=keys.begin == 0)  # type: ignore
        if grad_k_weight is not None:
            hl.store(grad_k_weight, [cols], total.to(grad_k_weight.dtype), extra_mask=keys.begin == 1)  # type: ignore


def prepare(
    x: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float, dtype: torch.dtype, interleaved: bool, K: int, *tensors: Opt
) -> list[Any]:  # fmt: skip
    """Numbers, options, and tensors with no size of 1, which Helion builds into the code. K is the lesser number of heads.

    A single position of each batch is as good as many positions of a single batch, which is seen as two.
    """
    (B, H, T, D), R = x.shape, cos.size(-1)
    numbers = float(eps), float(offset), B * T, B * T * H, max(R if interleaved else R // 2, D - R)
    options = hl.constexpr((interleaved, R // 2, D - R, dtype, min(next_power_of_2(K), 8)))
    # A tile of angles has its heads, too, from the same addresses: of positions alone it would be laid out in another way than
    # x, and cross shared memory to it.
    every = [x, *(table.unsqueeze(-3).expand(B, H, -1, -1) for table in (cos, sin)), *tensors]
    every = [t if t is None or T > 1 else t.transpose(0, -2) for t in every]
    return [numbers, options, *(t.expand(2, *t.shape[1:]) if t is not None and 1 in (B, T) else t for t in every)]


def qk_norm_rope_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    casting: Casting, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outs = torch.empty_like(q), torch.empty_like(k)
    shared = cos, sin, eps, offset, q.dtype if casting == "llama" else torch.float32, interleaved, min(q.size(1), k.size(1))
    for x, weight, out in ((q, q_weight, outs[0]), (k, k_weight, outs[1])):
        numbers, options, x, *tensors = prepare(x, *shared, out)
        qk_norm_rope_fwd_kernel(x, weight, *tensors, numbers, options)  # type: ignore
    return outs


def qk_norm_rope_bwd(
    grad_q_out: Tensor, grad_k_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float, offset: float, interleaved: bool, needs: list[bool],
) -> tuple[Opt, Opt, Opt, Opt]:  # fmt: skip
    grads = [torch.empty_like(t) if need else None for t, need in zip((q, k, q_weight, k_weight), needs, strict=True)]
    shared = cos, sin, eps, offset, torch.float32, interleaved, min(q.size(1), k.size(1))
    calls: list[Any] = []
    for i, (x, weight, grad) in enumerate(((q, q_weight, grad_q_out), (k, k_weight, grad_k_out))):
        numbers, options, x, *tensors = prepare(x, *shared, grad, grads[i])
        h, t, _ = qk_norm_rope_bwd_kernel.config(x, numbers, options)["block_sizes"]
        blocks, step = numbers[2] // x.size(2) * cdiv(x.size(1), h), max(t, 16)
        # Two programs for each processor have as many positions each.
        run = cdiv(x.size(2) * blocks, step * 2 * gpu(x.get_device()).processors) * step
        programs = blocks * cdiv(x.size(2), run) if needs[2 + i] else 0
        calls.append((programs, (x, weight, *tensors), (run, numbers, options)))
    queries, rows = calls[0][0], calls[0][0] + calls[1][0]
    sums = q.new_empty(max(rows, 1), q.size(3), dtype=torch.float32)
    for (programs, tensors, others), at in zip(calls, (0, queries), strict=True):
        if programs or tensors[-1] is not None:
            qk_norm_rope_bwd_kernel(*tensors, sums.narrow(0, at, programs) if programs else None, *others)  # type: ignore
    if rows:
        qk_norm_rope_sum_kernel(sums, queries, *grads[2:])  # type: ignore
    return tuple(grads)  # type: ignore


qk_norm_rope = op.implement(qk_norm_rope_fwd, qk_norm_rope_bwd)

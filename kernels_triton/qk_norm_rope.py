"""RMS norm of each head of queries and keys, then rotary embedding: one launch, and backward a small one for the weights.

A tile has heads that lie together in memory, of queries or of keys: the first programs have tiles of queries, the others keys.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import Gpu, gpu
from kernels_reference.qk_norm_rope import Casting, op

from ._launch import configured, launch, next_power_of_2
from ._norm import sum_partials
from .rope import load_pairs, store_pairs

Opt = Tensor | None


@triton.jit
def either(
    on_q, q_ptr, q_stride_b, q_stride_h, q_stride_t, q_stride_d, k_ptr, k_stride_b, k_stride_h, k_stride_t, k_stride_d
):  # fmt: skip
    ptr, stride_b = tl.where(on_q, q_ptr, k_ptr), tl.where(on_q, q_stride_b, k_stride_b)
    stride_h, stride_t = tl.where(on_q, q_stride_h, k_stride_h), tl.where(on_q, q_stride_t, k_stride_t)
    return ptr, stride_b, stride_h, stride_t, tl.where(on_q, q_stride_d, k_stride_d)


@triton.jit(do_not_specialize=["H", "K", "T", "q_rows", "k_rows", "blocks", "steps", "q_programs", "write_q", "write_k"])
def qk_norm_rope_kernel(
    q_ptr, q_stride_b, q_stride_h, q_stride_t, q_stride_d,  # (B, H, T, D)
    k_ptr, k_stride_b, k_stride_h, k_stride_t, k_stride_d,  # (B, K, T, D)
    grad_q_out_ptr, grad_q_out_stride_b, grad_q_out_stride_h, grad_q_out_stride_t, grad_q_out_stride_d,  # or None
    grad_k_out_ptr, grad_k_out_stride_b, grad_k_out_stride_h, grad_k_out_stride_t, grad_k_out_stride_d,
    q_out_ptr, q_out_stride_b, q_out_stride_h, q_out_stride_t, q_out_stride_d,  # backward the gradient of q
    k_out_ptr, k_out_stride_b, k_out_stride_h, k_out_stride_t, k_out_stride_d,
    q_weight_ptr, q_weight_stride,  # (D,)
    k_weight_ptr, k_weight_stride,  # (D,)
    cos_ptr, cos_stride_b, cos_stride_t, cos_stride_d,  # (B, T, R)
    sin_ptr, sin_stride_b, sin_stride_t, sin_stride_d,  # (B, T, R)
    partial_ptr,  # (programs, D), each one's share in the gradient of its weight; or None
    H, K, T,
    q_rows, k_rows,  # heads of all positions, and of those that the last block of positions lacks
    blocks,  # of SPAN positions
    steps,  # tiles to a program
    q_programs, write_q, write_k, eps, offset,
    D: tl.constexpr, HALF: tl.constexpr,  # R / 2
    ROWS: tl.constexpr, SPAN: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROUND_NORMED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    on_q = pid < q_programs
    x_ptr, x_stride_b, x_stride_h, x_stride_t, x_stride_d = either(
        on_q, q_ptr, q_stride_b, q_stride_h, q_stride_t, q_stride_d, k_ptr, k_stride_b, k_stride_h, k_stride_t, k_stride_d
    )
    out_ptr, out_stride_b, out_stride_h, out_stride_t, out_stride_d = either(
        on_q, q_out_ptr, q_out_stride_b, q_out_stride_h, q_out_stride_t, q_out_stride_d,
        k_out_ptr, k_out_stride_b, k_out_stride_h, k_out_stride_t, k_out_stride_d,
    )  # fmt: skip
    if grad_q_out_ptr is not None:
        grad_ptr, grad_stride_b, grad_stride_h, grad_stride_t, grad_stride_d = either(
            on_q, grad_q_out_ptr, grad_q_out_stride_b, grad_q_out_stride_h, grad_q_out_stride_t, grad_q_out_stride_d,
            grad_k_out_ptr, grad_k_out_stride_b, grad_k_out_stride_h, grad_k_out_stride_t, grad_k_out_stride_d,
        )  # fmt: skip
    heads, rows, write = tl.where(on_q, H, K), tl.where(on_q, q_rows, k_rows), tl.where(on_q, write_q, write_k) != 0
    weight_ptr, weight_stride = tl.where(on_q, q_weight_ptr, k_weight_ptr), tl.where(on_q, q_weight_stride, k_weight_stride)
    w1, w2 = load_pairs(weight_ptr, heads > 0, 0, HALF, weight_stride, BLOCK_D, INTERLEAVED)
    w1, w2 = w1 + offset, w2 + offset
    rest = HALF * 2 + tl.arange(0, BLOCK_REST)[None, None, :].to(tl.int64)
    if BLOCK_REST > 1:
        w3 = tl.load(weight_ptr + rest * weight_stride, rest < D, other=0.0).to(tl.float32) + offset
    on_w1 = tl.zeros((ROWS, 1, BLOCK_D), tl.float32)
    on_w2 = tl.zeros((ROWS, 1, BLOCK_D), tl.float32)
    on_w3 = tl.zeros((ROWS, 1, BLOCK_REST), tl.float32)
    first = tl.where(on_q, pid, pid - q_programs).to(rows.dtype) * steps * ROWS
    for step in tl.range(0, steps, num_stages=STAGES):  # type: ignore[misc]
        # Positions of a block lie inside its heads; the rows of a tile follow one another in memory either way.
        row = first + step * ROWS + tl.arange(0, ROWS)[:, None, None]
        block = row // SPAN // heads
        h, t = (row // SPAN % heads).to(tl.int64), (block % blocks * SPAN + row % SPAN).to(tl.int64)
        b, live = (block // blocks).to(tl.int64), (row < rows) & (t < T)
        x_row = x_ptr + b * x_stride_b + h * x_stride_h + t * x_stride_t
        out_row = out_ptr + b * out_stride_b + h * out_stride_h + t * out_stride_t
        x1, x2 = load_pairs(x_row, live, 0, HALF, x_stride_d, BLOCK_D, INTERLEAVED)
        if grad_q_out_ptr is not None:
            grad_row = grad_ptr + b * grad_stride_b + h * grad_stride_h + t * grad_stride_t  # type: ignore
            g1, g2 = load_pairs(grad_row, live, 0, HALF, grad_stride_d, BLOCK_D, INTERLEAVED)  # type: ignore
        cos_row, sin_row = cos_ptr + b * cos_stride_b + t * cos_stride_t, sin_ptr + b * sin_stride_b + t * sin_stride_t
        cos1, cos2 = load_pairs(cos_row, live, 0, HALF, cos_stride_d, BLOCK_D, INTERLEAVED)
        sin1, sin2 = load_pairs(sin_row, live, 0, HALF, sin_stride_d, BLOCK_D, INTERLEAVED)
        squares = tl.sum(x1 * x1 + x2 * x2, axis=2, keep_dims=True)
        if BLOCK_REST > 1:
            x3 = tl.load(x_row + rest * x_stride_d, live & (rest < D), other=0.0).to(tl.float32)
            squares += tl.sum(x3 * x3, axis=2, keep_dims=True)
        # Lanes without a row would make the sums for the weights NaN where eps is 0.
        rstd = tl.where(live, tl.rsqrt(squares / D + eps), 0.0)
        x1, x2 = x1 * rstd, x2 * rstd
        if ROUND_NORMED:
            x1, x2 = x1.to(x_ptr.dtype.element_ty).to(tl.float32), x2.to(x_ptr.dtype.element_ty).to(tl.float32)
        if grad_q_out_ptr is None:
            x1, x2 = x1 * w1, x2 * w2
            y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
            if BLOCK_REST > 1:
                x3 *= rstd  # type: ignore
                if ROUND_NORMED:
                    x3 = x3.to(x_ptr.dtype.element_ty).to(tl.float32)
                y3 = x3 * w3  # type: ignore
        else:
            y1, y2 = g1 * cos1 + g2 * sin2, g2 * cos2 - g1 * sin1  # type: ignore
            on_w1, on_w2 = on_w1 + y1 * x1, on_w2 + y2 * x2
            y1, y2 = y1 * w1, y2 * w2
            dots = tl.sum(y1 * x1 + y2 * x2, axis=2, keep_dims=True)
            if BLOCK_REST > 1:
                y3 = tl.load(grad_row + rest * grad_stride_d, live & (rest < D), other=0.0).to(tl.float32)  # type: ignore
                x3 *= rstd  # type: ignore
                on_w3 += y3 * x3
                y3 *= w3  # type: ignore
                dots += tl.sum(y3 * x3, axis=2, keep_dims=True)
                y3 = (y3 - x3 * (dots / D)) * rstd
            y1, y2 = (y1 - x1 * (dots / D)) * rstd, (y2 - x2 * (dots / D)) * rstd
        store_pairs(out_row, y1, y2, live & write, 0, HALF, out_stride_d, BLOCK_D, INTERLEAVED)
        if BLOCK_REST > 1:
            tl.store(out_row + rest * out_stride_d, y3, live & write & (rest < D))  # type: ignore
    if partial_ptr is not None:
        at = partial_ptr + pid.to(tl.int64) * D
        on_w1, on_w2 = tl.sum(on_w1, axis=0, keep_dims=True), tl.sum(on_w2, axis=0, keep_dims=True)
        store_pairs(at, on_w1, on_w2, heads > 0, 0, HALF, 1, BLOCK_D, INTERLEAVED)
        if BLOCK_REST > 1:
            tl.store(at + rest, tl.sum(on_w3, axis=0, keep_dims=True), rest < D)


@triton.jit(do_not_specialize=["q_programs", "k_programs"])
def qk_norm_rope_sum_kernel(
    partial_ptr,  # (q_programs + k_programs, D)
    grad_q_weight_ptr, grad_k_weight_ptr,  # (D,), or None
    q_programs, k_programs, D, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        if grad_q_weight_ptr is not None:
            sum_partials(partial_ptr, grad_q_weight_ptr, q_programs, D, BLOCK_M, BLOCK_N)
    elif grad_k_weight_ptr is not None:
        sum_partials(partial_ptr + tl.cast(q_programs, tl.int64) * D, grad_k_weight_ptr, k_programs, D, BLOCK_M, BLOCK_N)


@configured(
    TILE=(1024, 2048, 4096, 8192),
    PER_WARP=(256, 512, 1024),
    PROGRAMS=(1, 2, 3, 4, 6, 8, 16, 32, 1024),
    STAGES=(1, 2, 3),
)
def qk_norm_rope_config(where: Gpu, M: int, H: int, D: int, itemsize: int, together: bool, backward: bool) -> dict[str, int]:
    # Forward, a program takes several tiles only where these share angles.
    return {"TILE": 4096, "PER_WARP": 512, "PROGRAMS": 3 if backward else 1024 if together else 16, "STAGES": 1}


def walk(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    interleaved: bool, *, grads: Sequence[Opt] = (None, None), round_normed: bool = False, needs: Sequence[bool] = (True,) * 4,
) -> tuple[Opt, Opt, Opt, Opt]:  # fmt: skip
    """The results or, of their gradients, those of q, k and the weights, where needed."""
    (B, _, T, D), R, backward, together = q.shape, cos.shape[-1], grads[0] is not None, q.stride(1) < q.stride(2)
    q_out, k_out, grad_q_weight, grad_k_weight = (
        torch.empty_like(t) if need else None for t, need in zip((q, k, q_weight, k_weight), needs, strict=True)
    )
    H, K = q.shape[1] * (needs[0] or needs[2]), k.shape[1] * (needs[1] or needs[3])
    config = qk_norm_rope_config(q.get_device(), B * T, H + K, D, q.itemsize, together, backward)
    block_d, block_rest = next_power_of_2(R // 2), max(next_power_of_2(D - R), 2) if R < D else 1
    width = block_d * 2 + block_rest // 2 * 2
    rows = min(max(config["TILE"] // next_power_of_2(width), 1), next_power_of_2(B * T * max(H, K)))
    span = 1 if together else min(rows, next_power_of_2(T))
    blocks = triton.cdiv(T, span)
    q_tiles, k_tiles = (triton.cdiv(B * blocks * span * n, rows) for n in (H, K))
    steps = triton.cdiv(q_tiles + k_tiles, config["PROGRAMS"] * gpu(q.get_device()).processors)
    q_programs, k_programs = triton.cdiv(q_tiles, steps), triton.cdiv(k_tiles, steps)
    weighed = backward and (needs[2] or needs[3])
    partial = q.new_empty(q_programs + k_programs, D, dtype=torch.float32) if weighed else None
    tables = ((t, 0 if t.ndim == 2 or t.shape[0] == 1 else t.stride(0), *t.stride()[-2:]) for t in (cos, sin))
    strided = (q, k, *grads, q if q_out is None else q_out, k if k_out is None else k_out, q_weight, k_weight)
    launch(
        qk_norm_rope_kernel,
        (q_programs + k_programs,),
        *(part for t in strided for part in ((None,) * 5 if t is None else (t, *t.stride()))),
        *(part for table in tables for part in table),
        *(partial, H, K, T, B * blocks * span * H, B * blocks * span * K, blocks, steps, q_programs),
        *(int(needs[0]), int(needs[1]), float(eps), float(offset)),
        *(D, R // 2, rows, span, block_d, block_rest, interleaved, round_normed, config["STAGES"]),
        num_warps=min(next_power_of_2(max(rows * width // config["PER_WARP"], 1)), 16),
    )
    if partial is not None:
        grads = grad_q_weight, grad_k_weight
        launch(
            qk_norm_rope_sum_kernel, (triton.cdiv(D, 16), 2), partial, *grads, q_programs, k_programs, D, 128, 16, num_warps=8
        )
    return q_out, k_out, grad_q_weight, grad_k_weight


def qk_norm_rope_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: float,
    casting: Casting, interleaved: bool,
) -> tuple[Opt, Opt]:  # fmt: skip
    inputs = q, k, q_weight, k_weight, cos, sin
    needs = True, True, False, False
    return walk(*inputs, eps, offset, interleaved, round_normed=casting == "llama", needs=needs)[:2]


def qk_norm_rope_bwd(
    grad_q_out: Tensor, grad_k_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    eps: float, offset: float, interleaved: bool, needs: Sequence[bool],
) -> tuple[Opt, Opt, Opt, Opt]:  # fmt: skip
    inputs = q, k, q_weight, k_weight, cos, sin
    return walk(*inputs, eps, offset, interleaved, grads=(grad_q_out, grad_k_out), needs=needs)


qk_norm_rope = op.implement(qk_norm_rope_fwd, qk_norm_rope_bwd)

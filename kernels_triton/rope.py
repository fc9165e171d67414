"""Rotary position embedding: one launch for queries and keys; a program reads its angles once and turns many heads."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference.rope import op

from ._launch import configured, launch, next_power_of_2


@triton.jit
def load_pairs(x_ptr, mask, first, half, stride, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Elements one and two of the pairs from `first`, in float32."""
    if INTERLEAVED:
        cols = first * 2 + tl.arange(0, BLOCK_D * 2)[None, None, :]
        x = tl.load(x_ptr + cols.to(tl.int64) * stride, mask & (cols < half * 2), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_D, 2)))
    else:
        cols = first + tl.arange(0, BLOCK_D)[None, None, :]
        mask = mask & (cols < half)
        x1 = tl.load(x_ptr + cols.to(tl.int64) * stride, mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + (cols + half).to(tl.int64) * stride, mask, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def store_pairs(out_ptr, x1, x2, mask, first, half, stride, BLOCK_D: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        cols = first * 2 + tl.arange(0, BLOCK_D * 2)[None, None, :]
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], x1.shape[1], BLOCK_D * 2))
        tl.store(out_ptr + cols.to(tl.int64) * stride, x, mask & (cols < half * 2))
    else:
        cols = first + tl.arange(0, BLOCK_D)[None, None, :]
        mask = mask & (cols < half)
        tl.store(out_ptr + cols.to(tl.int64) * stride, x1, mask)
        tl.store(out_ptr + (cols + half).to(tl.int64) * stride, x2, mask)


@triton.jit(do_not_specialize=["B", "H", "K", "T", "heads", "groups", "columns"])
def rope_kernel(
    q_ptr,  # (B, H, T, D)
    k_ptr,  # (B, K, T, D)
    cos_ptr,  # (B, T, R)
    sin_ptr,  # (B, T, R)
    q_out_ptr,  # (B, H, T, D)
    k_out_ptr,  # (B, K, T, D)
    B, H, K, T, D,
    half,  # R / 2
    heads,  # of H + K, to a program
    groups,  # of heads
    columns,  # blocks of pairs and of what passes through
    q_stride_b, q_stride_h, q_stride_t, q_stride_d,
    k_stride_b, k_stride_h, k_stride_t, k_stride_d,
    cos_stride_b, cos_stride_t, cos_stride_d,
    sin_stride_b, sin_stride_t, sin_stride_d,
    q_out_stride_b, q_out_stride_h, q_out_stride_t, q_out_stride_d,
    k_out_stride_b, k_out_stride_h, k_out_stride_t, k_out_stride_d,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Programs that share angles are neighbours: all heads of some positions, then the same positions of the next batch.
    pid = tl.program_id(0)
    start, column, block = pid % groups * heads, pid // groups % columns, pid // (groups * columns)
    b = (block % B).to(tl.int64)
    t = (block // B).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    mask, first = t < T, column * BLOCK_D
    cos_ptr += b * cos_stride_b + t * cos_stride_t
    sin_ptr += b * sin_stride_b + t * sin_stride_t
    cos1, cos2 = load_pairs(cos_ptr, mask, first, half, cos_stride_d, BLOCK_D, INTERLEAVED)
    sin1, sin2 = load_pairs(sin_ptr, mask, first, half, sin_stride_d, BLOCK_D, INTERLEAVED)
    if BACKWARD:
        sin1, sin2 = -sin2, -sin1
    for part in tl.static_range(2):  # type: ignore
        if part == 0:
            head, stop = start, tl.minimum(start + heads, H)
            x_ptr = q_ptr + b * q_stride_b + t * q_stride_t
            out_ptr = q_out_ptr + b * q_out_stride_b + t * q_out_stride_t
            x_stride_h, x_stride_d, out_stride_h, out_stride_d = q_stride_h, q_stride_d, q_out_stride_h, q_out_stride_d
        else:
            head, stop = tl.maximum(start, H) - H, tl.minimum(start + heads, H + K) - H
            x_ptr = k_ptr + b * k_stride_b + t * k_stride_t
            out_ptr = k_out_ptr + b * k_out_stride_b + t * k_out_stride_t
            x_stride_h, x_stride_d, out_stride_h, out_stride_d = k_stride_h, k_stride_d, k_out_stride_h, k_out_stride_d
        for first_head in tl.range(head, stop, BLOCK_H, num_stages=STAGES):  # type: ignore
            h = first_head + tl.arange(0, BLOCK_H)[None, :, None]
            x_heads, out_heads = x_ptr + h.to(tl.int64) * x_stride_h, out_ptr + h.to(tl.int64) * out_stride_h
            live = mask & (h < stop)
            x1, x2 = load_pairs(x_heads, live, first, half, x_stride_d, BLOCK_D, INTERLEAVED)
            if BLOCK_REST > 0:
                cols = half * 2 + column * BLOCK_REST + tl.arange(0, BLOCK_REST)[None, None, :]
                passing = tl.load(x_heads + cols.to(tl.int64) * x_stride_d, live & (cols < D))
                tl.store(out_heads + cols.to(tl.int64) * out_stride_d, passing, live & (cols < D))
            y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
            store_pairs(out_heads, y1, y2, live, first, half, out_stride_d, BLOCK_D, INTERLEAVED)


@configured(
    TILE=(512, 1024, 2048, 4096, 8192),
    PER_WARP=(128, 256, 512, 1024, 2048),
    PROGRAMS=(512, 1024, 2048, 4096, 8192),
    STAGES=(1, 2, 3, 4),
)
def rope_config(where: Gpu, M: int, H: int, D: int, itemsize: int, interleaved: bool) -> dict[str, int]:
    return {"TILE": 2048, "PER_WARP": 512, "PROGRAMS": 2048, "STAGES": 1}


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backward: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    q_out, k_out = (torch.empty_like(x) if need else None for x, need in zip((q, k), needs, strict=True))
    (B, _, T, D), R = q.shape, cos.shape[-1]
    heads_q, heads_k = q.shape[1] * needs[0], k.shape[1] * needs[1]
    config = rope_config(q.get_device(), B * T, heads_q + heads_k, D, q.itemsize, interleaved)
    block_d = min(next_power_of_2(R // 2), 256)
    block_rest = min(next_power_of_2(D - R), max(block_d * 2, 128)) if R < D else 0
    columns = max(triton.cdiv(R, block_d * 2), triton.cdiv(D - R, max(block_rest, 1)))
    # A tile has rows that lie together in memory: heads of a position or positions of a head.
    width, most_t, most_h = max(block_d * 2, block_rest), next_power_of_2(T), next_power_of_2(max(heads_q, heads_k))
    rows = max(config["TILE"] // width, 1)
    block_h = min(rows if q.stride(1) < q.stride(2) else rows // min(rows, most_t), most_h)
    block_t = min(rows // block_h, most_t)
    # As many heads to a program, for each set of angles, as leave enough programs.
    blocks = B * triton.cdiv(T, block_t) * columns
    groups = min(triton.cdiv(heads_q + heads_k, block_h), max(config["PROGRAMS"] // blocks, 1))
    heads = triton.cdiv(heads_q + heads_k, groups * block_h) * block_h
    groups = triton.cdiv(heads_q + heads_k, heads)
    strides = ((0 if table.ndim == 2 or table.shape[0] == 1 else table.stride(0), *table.stride()[-2:]) for table in (cos, sin))
    q_to, k_to = q if q_out is None else q_out, k if k_out is None else k_out
    launch(
        rope_kernel,
        (blocks * groups,),
        *(q, k, cos, sin, q_to, k_to, B, heads_q, heads_k, T, D, R // 2, heads, groups, columns),
        *(n for of in (q.stride(), k.stride(), *strides, q_to.stride(), k_to.stride()) for n in of),
        *(block_t, block_h, block_d, block_rest, interleaved, backward, config["STAGES"]),
        num_warps=min(max(block_t * block_h * width // config["PER_WARP"], 1), 16),
    )
    return q_out, k_out


def rope_fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor | None, Tensor | None]:
    return rotate(q, k, cos, sin, interleaved, backward=False, needs=(True, True))


def rope_bwd(
    grad_q_out: Tensor, grad_k_out: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    return rotate(grad_q_out, grad_k_out, cos, sin, interleaved, backward=True, needs=needs)


rope = op.implement(rope_fwd, rope_bwd)

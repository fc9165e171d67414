"""Softmax and its logarithm: a row stays on the chip where it fits, and is read twice, the second time backwards, where not."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernels_reference._config import Choice, Config, Gpu, gpu

from ._launch import launch, next_power_of_2, row_blocks
from ._online import LOG2E, finite, online_step


@triton.jit
def exp(x, dtype: tl.constexpr):
    # The fast one rounds its argument, which float32 would show.
    return libdevice.exp(x) if dtype == tl.float32 else tl.exp2(x * LOG2E)


@triton.jit
def gradient(grad_out, out, dot, dtype: tl.constexpr, LOG: tl.constexpr):
    return grad_out - exp(out, dtype) * dot if LOG else out * (grad_out - dot)


@triton.jit
def softmax_fwd_kernel(
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    out_ptr, out_stride_m, out_stride_n,  # (M, N)
    M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    for row in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):  # type: ignore[misc]
        rows = (row + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
        mask = (rows < M) & (cols < N)
        x = tl.load(x_ptr + rows * x_stride_m + cols.to(tl.int64) * x_stride_n, mask, other=float("-inf")).to(tl.float32)
        x -= tl.max(x, axis=1, keep_dims=True)
        e = exp(x, x_ptr.dtype.element_ty)
        total = tl.sum(e, axis=1, keep_dims=True)
        out = x - libdevice.log(total) if LOG else e / total  # pyright: ignore
        tl.store(out_ptr + rows * out_stride_m + cols.to(tl.int64) * out_stride_n, out, mask)


@triton.jit
def softmax_long_fwd_kernel(
    x_ptr, x_stride_m, x_stride_n,  # (M, N)
    out_ptr, out_stride_m, out_stride_n,  # (M, N)
    N, BLOCK_N: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    x_ptr += tl.program_id(0).to(tl.int64) * x_stride_m
    out_ptr += tl.program_id(0).to(tl.int64) * out_stride_m
    lanes = (tl.arange(0, BLOCK_N // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]).to(tl.int64)
    highest = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, N, BLOCK_N):
        # What is read again should stay in the L2 cache, what is read or written once should not.
        ptrs = x_ptr + (start + lanes) * x_stride_n
        x = tl.load(ptrs, start + lanes < N, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        highest, total = online_step(highest, total, x, 0)
    shift = finite(tl.max(highest, 0))
    total = tl.sum(total * tl.exp2(highest - shift), 0)
    # The difference is 0, but of a row with +inf it is NaN.
    total += total - total  # pyright: ignore
    scale = 1 / total
    # Exponents are of differences to `shift`, which is this times LOG2E but for a rounding, large where logits are.
    natural = shift / LOG2E
    log = libdevice.log(total) + tl.fma(natural, -LOG2E, shift) / LOG2E
    # What was read last is still in the cache.
    for back in range(BLOCK_N, N + BLOCK_N, BLOCK_N):
        cols = tl.cdiv(N, BLOCK_N) * BLOCK_N - back + lanes
        x = tl.load(x_ptr + cols * x_stride_n, cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
        out = x - natural - log if LOG else tl.exp2(tl.fma(x, LOG2E, -shift)) * scale
        tl.store(out_ptr + cols * out_stride_n, out, cols < N, eviction_policy="evict_first")


@triton.jit
def softmax_bwd_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_n,  # (M, N)
    out_ptr, out_stride_m, out_stride_n,  # (M, N)
    grad_x_ptr, grad_x_stride_m, grad_x_stride_n,  # (M, N)
    M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AGAIN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.arange(0, BLOCK_N)[None, :].to(tl.int64)
    mask = (rows < M) & (cols < N)
    grad_out_ptr += rows * grad_out_stride_m + cols * grad_out_stride_n
    grad_out = tl.load(grad_out_ptr, mask, other=0.0, eviction_policy="evict_last" if AGAIN else "").to(tl.float32)
    out = tl.load(out_ptr + rows * out_stride_m + cols * out_stride_n, mask, other=0.0).to(tl.float32)
    dot = tl.sum(grad_out if LOG else grad_out * out, axis=1, keep_dims=True)
    if AGAIN:  # There are not registers enough for both, but the L1 cache has them.
        grad_out = tl.load(grad_out_ptr, mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    grad_x = gradient(grad_out, out, dot, out_ptr.dtype.element_ty, LOG)
    tl.store(grad_x_ptr + rows * grad_x_stride_m + cols * grad_x_stride_n, grad_x, mask)


@triton.jit
def softmax_long_bwd_kernel(
    grad_out_ptr, grad_out_stride_m, grad_out_stride_n,  # (M, N)
    out_ptr, out_stride_m, out_stride_n,  # (M, N)
    grad_x_ptr, grad_x_stride_m, grad_x_stride_n,  # (M, N)
    N, BLOCK_N: tl.constexpr, LANES: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    grad_out_ptr += tl.program_id(0).to(tl.int64) * grad_out_stride_m
    out_ptr += tl.program_id(0).to(tl.int64) * out_stride_m
    grad_x_ptr += tl.program_id(0).to(tl.int64) * grad_x_stride_m
    lanes = (tl.arange(0, BLOCK_N // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]).to(tl.int64)
    dot = tl.zeros((LANES,), tl.float32)
    end = (tl.cdiv(N, BLOCK_N) - 1) * BLOCK_N
    for start in range(0, end, BLOCK_N):
        cols = start + lanes
        grad_out = tl.load(grad_out_ptr + cols * grad_out_stride_n, eviction_policy="evict_last").to(tl.float32)
        if not LOG:
            grad_out *= tl.load(out_ptr + cols * out_stride_n, eviction_policy="evict_last").to(tl.float32)
        dot += tl.sum(grad_out, 0)
    cols = end + lanes
    grad_kept = tl.load(grad_out_ptr + cols * grad_out_stride_n, cols < N, other=0.0, eviction_policy="evict_first")
    kept = tl.load(out_ptr + cols * out_stride_n, cols < N, other=0.0, eviction_policy="evict_first")
    grad_out = grad_kept.to(tl.float32)
    dot = tl.sum(dot + tl.sum(grad_out if LOG else grad_out * kept.to(tl.float32), 0), 0)
    grad_x = gradient(grad_kept.to(tl.float32), kept.to(tl.float32), dot, out_ptr.dtype.element_ty, LOG)
    tl.store(grad_x_ptr + cols * grad_x_stride_n, grad_x, cols < N, eviction_policy="evict_first")
    for back in range(BLOCK_N, end + BLOCK_N, BLOCK_N):
        cols = end - back + lanes
        grad_out = tl.load(grad_out_ptr + cols * grad_out_stride_n, eviction_policy="evict_first").to(tl.float32)
        out = tl.load(out_ptr + cols * out_stride_n, eviction_policy="evict_first").to(tl.float32)
        grad_x = gradient(grad_out, out, dot, out_ptr.dtype.element_ty, LOG)
        tl.store(grad_x_ptr + cols * grad_x_stride_n, grad_x, eviction_policy="evict_first")


SPACE: dict[str, tuple[int, ...]] = {
    "BLOCK_M": (1, 2, 4, 8, 16, 32, 64),
    "BLOCK_N": (4096, 8192, 16384, 32768),
    "num_warps": (1, 2, 4, 8, 16, 32),
}
FWD_SPACE = SPACE | {"num_stages": (1, 2, 3, 4), "PROGRAMS": (0, 1, 2, 4)}
"""PROGRAMS to a processor; none means one to a tile."""


def long_block(N: int, itemsize: int, size: int) -> int:
    """Of `size` bytes, but where elements are read one by one: each has an address of its own in registers."""
    return 8192 if N % 16 else size // itemsize


def fwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    if N * itemsize > 65536:
        blocks = 1, long_block(N, itemsize, 65536), where.warps
    else:
        block_m, block_n, warps = row_blocks(M, N, most=32768)
        blocks = block_m, block_n, min(warps, 16)
    # The widest rows leave room for one program, which reads the next row while it works on this one.
    row = blocks[1] * itemsize
    ahead = 32768 < row and 2 * row < where.shared and N <= blocks[1] and M > 2 * where.processors
    return dict(zip(SPACE, blocks, strict=True)) | {"num_stages": 3 if ahead else 1, "PROGRAMS": int(ahead)}


def bwd_config(where: Gpu, M: int, N: int, itemsize: int) -> dict[str, int]:
    blocks = (1, long_block(N, itemsize, 32768), 16) if N * itemsize > 65536 else row_blocks(M, N, most=32768)
    return dict(zip(SPACE, blocks, strict=True)) | {"num_warps": min(blocks[2], where.warps)}


def lanes(config: Config, x: Tensor) -> int:
    """Of a long row's tile: a thread reads 16 bytes at once, at several places."""
    return min(config["BLOCK_N"] // 4, config["num_warps"] * 32 * (16 // x.itemsize))


def forward(choice: Choice, x: Tensor, log: bool) -> Tensor:
    (M, N), out, device = x.shape, torch.empty_like(x), x.get_device()
    config = choice(device, M, N, x.itemsize)
    layouts, warps = (x, *x.stride(), out, *out.stride()), config["num_warps"]
    if N > config["BLOCK_N"]:
        launch(softmax_long_fwd_kernel, (M,), *layouts, N, config["BLOCK_N"], lanes(config, x), log, num_warps=warps)
        return out
    block_m, block_n = config["BLOCK_M"], min(config["BLOCK_N"], next_power_of_2(N))
    programs = min(triton.cdiv(M, block_m), config["PROGRAMS"] * gpu(device).processors or M)
    blocks = block_m, block_n, config["num_stages"]
    launch(softmax_fwd_kernel, (programs,), *layouts, M, N, *blocks, log, num_warps=warps)
    return out


def backward(choice: Choice, grad_out: Tensor, out: Tensor, log: bool) -> Tensor:
    (M, N), grad_x = out.shape, torch.empty_like(out)
    config = choice(out.get_device(), M, N, out.itemsize)
    layouts, warps = (grad_out, *grad_out.stride(), out, *out.stride(), grad_x, *grad_x.stride()), config["num_warps"]
    if N > config["BLOCK_N"]:
        launch(softmax_long_bwd_kernel, (M,), *layouts, N, config["BLOCK_N"], lanes(config, out), log, num_warps=warps)
        return grad_x
    block_m, block_n = config["BLOCK_M"], min(config["BLOCK_N"], next_power_of_2(N))
    blocks = block_m, block_n, block_m * block_n > 512 * warps
    launch(softmax_bwd_kernel, (triton.cdiv(M, block_m),), *layouts, M, N, *blocks, log, num_warps=warps)
    return grad_x

"""The kernels of the gated activations: over tiles in any strides, or over one long row where everything is contiguous."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_reference._config import Choice
from kernels_reference._glu import Maybe, empty_out, split

from ._launch import launch, tile_width

SPACE = {"TILE": (512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16)}


@triton.jit
def activate(x, alpha, ACTIVATION: tl.constexpr):
    """The activation, and its derivative."""
    if ACTIVATION == "silu":
        scaled = x if alpha is None else alpha * x
        share = tl.sigmoid(scaled)
        slope = share * (1 + scaled * (1 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        # (1 + tanh(u)) / 2 is sigmoid(2 * u), which loses nothing to cancellation.
        square = x * x
        share = tl.sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * square))
        slope = share + share * (1 - share) * x * (1.5957691216057308 + 0.21406444881780076 * square)
    return x * share, slope


@triton.jit
def clamp(gate, up, limit):
    if limit is not None:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def place(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """This program's rows, its first column, and whether all its elements exist."""
    blocks = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N
    return row + tl.arange(0, BLOCK_M)[:, None], col, (row + BLOCK_M <= M) & (col + BLOCK_N <= N)


@triton.jit
def read(gate_ptr, up_ptr, mask, gate_mask):
    gate = tl.load(gate_ptr, gate_mask).to(tl.float32)
    if up_ptr is None:
        gate, up = tl.split(tl.reshape(gate, gate.shape[0], gate.shape[1] // 2, 2))
    else:
        up = tl.load(up_ptr, mask).to(tl.float32)
    return gate, up


@triton.jit
def forward(gate_ptr, up_ptr, out_ptr, mask, gate_mask, alpha, limit, offset, ACTIVATION: tl.constexpr):
    gate, up = read(gate_ptr, up_ptr, mask, gate_mask)
    gate, up = clamp(gate, up, limit)
    if offset is not None:
        up += offset
    value, _ = activate(gate, alpha, ACTIVATION)
    tl.store(out_ptr, value * up, mask)


@triton.jit
def backward(
    grad_out_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, mask, gate_mask, alpha, limit, offset, ACTIVATION: tl.constexpr
):
    given_gate, given_up = read(gate_ptr, up_ptr, mask, gate_mask)
    grad_out = tl.load(grad_out_ptr, mask).to(tl.float32)
    gate, up = clamp(given_gate, given_up, limit)
    if offset is not None:
        up += offset
    value, slope = activate(gate, alpha, ACTIVATION)
    grad_gate, grad_up = grad_out * up * slope, grad_out * value
    if limit is not None:
        grad_gate = tl.where(given_gate <= limit, grad_gate, 0.0)
        grad_up = tl.where(tl.abs(given_up) <= limit, grad_up, 0.0)
    if up_ptr is None:
        pairs = tl.reshape(tl.join(grad_gate, grad_up), gate_ptr.shape)
        tl.store(grad_gate_ptr, pairs, gate_mask)
    else:
        if grad_gate_ptr is not None:
            tl.store(grad_gate_ptr, grad_gate, mask)
        if grad_up_ptr is not None:
            tl.store(grad_up_ptr, grad_up, mask)


@triton.jit
def glu_fwd_kernel(
    out_ptr,  # (M, N)
    gate_ptr,  # (M, N), or (M, 2 * N) with up between
    up_ptr,  # (M, N), or None
    M, N, out_stride_m, out_stride_n, gate_stride_m, gate_stride_n, up_stride_m, up_stride_n,
    alpha, limit, offset,  # None where they change nothing
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, col, whole = place(M, N, BLOCK_M, BLOCK_N)
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    gate_cols = 2 * col + tl.arange(0, 2 * BLOCK_N)[None, :] if up_ptr is None else cols
    out_ptr += rows * out_stride_m + cols * out_stride_n
    gate_ptr += rows * gate_stride_m + gate_cols * gate_stride_n
    if up_ptr is not None:
        up_ptr += rows * up_stride_m + cols * up_stride_n
    # A mask over a size that 16 does not divide makes every access a single element; whole tiles do without.
    if whole:
        forward(gate_ptr, up_ptr, out_ptr, None, None, alpha, limit, offset, ACTIVATION)
    else:
        mask = (rows < M) & (cols < N)
        gate_mask = (rows < M) & (gate_cols // 2 < N) if up_ptr is None else mask
        forward(gate_ptr, up_ptr, out_ptr, mask, gate_mask, alpha, limit, offset, ACTIVATION)


@triton.jit
def glu_bwd_kernel(
    grad_out_ptr,  # (M, N)
    gate_ptr,  # (M, N), or (M, 2 * N) with up between
    up_ptr,  # (M, N), or None
    grad_gate_ptr,  # as gate, or None
    grad_up_ptr,  # (M, N), or None
    M, N, grad_out_stride_m, grad_out_stride_n, gate_stride_m, gate_stride_n, up_stride_m, up_stride_n,
    grad_gate_stride_m, grad_gate_stride_n, grad_up_stride_m, grad_up_stride_n,
    alpha, limit, offset,  # None where they change nothing
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, col, whole = place(M, N, BLOCK_M, BLOCK_N)
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    gate_cols = 2 * col + tl.arange(0, 2 * BLOCK_N)[None, :] if up_ptr is None else cols
    grad_out_ptr += rows * grad_out_stride_m + cols * grad_out_stride_n
    gate_ptr += rows * gate_stride_m + gate_cols * gate_stride_n
    if up_ptr is not None:
        up_ptr += rows * up_stride_m + cols * up_stride_n
    if grad_gate_ptr is not None:
        grad_gate_ptr += rows * grad_gate_stride_m + gate_cols * grad_gate_stride_n
    if grad_up_ptr is not None:
        grad_up_ptr += rows * grad_up_stride_m + cols * grad_up_stride_n
    if whole:
        backward(grad_out_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, None, None, alpha, limit, offset, ACTIVATION)
    else:
        mask = (rows < M) & (cols < N)
        gate_mask = (rows < M) & (gate_cols // 2 < N) if up_ptr is None else mask
        backward(grad_out_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, mask, gate_mask, alpha, limit, offset, ACTIVATION)


def over_tiles(kernel: Any, choice: Choice, options: tuple[Any, ...], lead: Tensor, *tensors: Maybe) -> None:
    """Launches a kernel on tensors of which the first is (M, N)."""
    present = [t for t in (lead, *tensors) if t is not None]
    one_row, column_major = all(t.is_contiguous() for t in present), any(t.stride(0) == 1 for t in present)
    M, N = (1, lead.numel()) if one_row else lead.shape
    config = choice(lead.get_device(), M, N, lead.itemsize, column_major and not one_row)
    tile = config["TILE"]
    block_n = tile if one_row else tile_width(N, tile, column_major)
    block_m = 1 if one_row else tile // block_n
    strides = [stride for t in (lead, *tensors) for stride in ((0, 1) if one_row or t is None else t.stride())]
    grid = (triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)
    launch(kernel, grid, lead, *tensors, M, N, *strides, *options, block_m, block_n, num_warps=config["num_warps"])


def glu_fwd(choice: Choice, gate: Tensor, up: Maybe, interleaved: bool, *options: Any) -> Tensor:
    """The options are alpha, limit, offset and the name of the activation."""
    out = empty_out(gate, up)
    if not interleaved:
        gate, up = split(gate, up, interleaved)
    over_tiles(glu_fwd_kernel, choice, options, out, gate, up)
    return out


def glu_bwd(
    choice: Choice, grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, needs: list[bool], *options: Any
) -> tuple[Maybe, Maybe]:
    grad_gate = torch.empty_like(gate) if needs[0] else None
    grad_up = torch.empty_like(up) if up is not None and needs[1] else None
    if up is not None or interleaved:
        over_tiles(glu_bwd_kernel, choice, options, grad_out, gate, up, grad_gate, grad_up)
    elif grad_gate is not None:
        halves = *split(gate, None, False), *split(grad_gate, None, False)
        over_tiles(glu_bwd_kernel, choice, options, grad_out, *halves)
    return grad_gate, grad_up

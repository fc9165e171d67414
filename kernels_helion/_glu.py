"""The kernels of the gated activations: over tiles in any strides, or over rows of eight where everything is contiguous.

Options that are not in use are None, which Helion builds into the code.
"""

import math
from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._glu import Maybe, empty_out, split

from ._kernel import Kernel, column_major, kernel, rows_and_columns, tile_width

Number = float | None


def sizes(*tensors: Any) -> dict[str, int]:
    return {**rows_and_columns(*tensors), "column_major": column_major(*tensors)}


def tile_config(out: Tensor, *others: Any, tile: int = 1024) -> dict[str, Any]:
    M, N = out.shape
    # A dimension of 1 takes a block of 1: Helion 1.5.0 lets every lane store to it, those beyond the end too.
    block_n = tile_width(M, N, tile, column_major(out, *others))
    return {"block_sizes": [1 if M == 1 else tile // block_n, block_n], "loop_orders": [[1, 0]], "num_warps": 4}


def read(rows: Any, cols: Any, gate: Tensor, up: Maybe) -> tuple[Tensor, Tensor]:
    if up is None:
        both = 2 * cols.begin + hl.arange(2 * cols.block_size)
        pairs = hl.load(gate, [rows, both], extra_mask=(both < gate.size(1)).unsqueeze(0)).float()
        return hl.split(pairs.view(rows.block_size, cols.block_size, 2))
    return hl.load(gate, [rows, cols]).float(), hl.load(up, [rows, cols]).float()


def write(rows: Any, cols: Any, grad_gate: Maybe, grad_up: Maybe, packed: bool, x: Tensor, y: Tensor) -> None:
    if packed and grad_gate is not None:
        both = 2 * cols.begin + hl.arange(2 * cols.block_size)
        pairs = hl.join(x, y).view(rows.block_size, 2 * cols.block_size).to(grad_gate.dtype)
        hl.store(grad_gate, [rows, both], pairs, extra_mask=(both < grad_gate.size(1)).unsqueeze(0))
    elif grad_gate is not None:
        hl.store(grad_gate, [rows, cols], x.to(grad_gate.dtype))
    if grad_up is not None:
        hl.store(grad_up, [rows, cols], y.to(grad_up.dtype))


def silu(x: Tensor, alpha: Number) -> tuple[Tensor, Tensor]:
    """`x * sigmoid(alpha * x)`, and its derivative."""
    scaled = x if alpha is None else alpha * x
    sigmoid = torch.sigmoid(scaled)
    return x * sigmoid, sigmoid * (1 + scaled * (1 - sigmoid))


def gelu(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The activation, and its derivative."""
    if not tanh:
        share = 0.5 + 0.5 * torch.erf(x * math.sqrt(0.5))
        return x * share, share + x * (1 / math.sqrt(2 * math.pi)) * torch.exp(-0.5 * x * x)
    # (1 + tanh(u)) / 2 is sigmoid(2 * u), which loses nothing to cancellation.
    linear, square = 2 * math.sqrt(2 / math.pi), x * x
    share = torch.sigmoid(x * (linear + 0.044715 * linear * square))
    return x * share, share + share * (1 - share) * x * (linear + 3 * 0.044715 * linear * square)


def activate(x: Tensor, alpha: Number, exact: bool | None, tanh: bool | None) -> tuple[Tensor, Tensor]:
    return silu(x, alpha) if exact is None and tanh is None else gelu(x, tanh is not None)


def clamp(x: Tensor, y: Tensor, limit: Number) -> tuple[Tensor, Tensor]:
    # NaN stays, since it compares as false; torch.clamp would ask for it besides.
    if limit is not None:
        x = torch.where(x > limit, limit, x)
        y = torch.where(y > limit, limit, torch.where(y < -limit, -limit, y))
    return x, y


def glu_fwd_kernel(
    out: Tensor, gate: Tensor, up: Maybe, eights: bool | None, alpha: Number, limit: Number, offset: Number,
    exact: bool | None, tanh: bool | None,
) -> None:  # fmt: skip
    m, n = out.size()
    if eights is not None:
        n = hl.specialize(n)  # Nor would alignment be known without the strides.
        hl.specialize((out.stride(0), gate.stride(0)))
        if up is not None:
            _ = hl.specialize(up.stride(0))
    for rows, cols in hl.tile([m, n]):
        x, y = read(rows, cols, gate, up)
        x, y = clamp(x, y, limit)
        if offset is not None:
            y = y + offset
        value = activate(x, alpha, exact, tanh)[0]
        out[rows, cols] = (value * y).to(out.dtype)


def glu_bwd_kernel(
    grad_out: Tensor, gate: Tensor, up: Maybe, grad_gate: Maybe, grad_up: Maybe, eights: bool | None,
    alpha: Number, limit: Number, offset: Number, exact: bool | None, tanh: bool | None,
) -> None:  # fmt: skip
    m, n = grad_out.size()
    if eights is not None:
        n = hl.specialize(n)  # Nor would alignment be known without the strides.
        hl.specialize((grad_out.stride(0), gate.stride(0)))
        if up is not None:
            _ = hl.specialize(up.stride(0))
        if grad_gate is not None:
            _ = hl.specialize(grad_gate.stride(0))
        if grad_up is not None:
            _ = hl.specialize(grad_up.stride(0))
    for rows, cols in hl.tile([m, n]):
        given_x, given_y = read(rows, cols, gate, up)
        x, y = clamp(given_x, given_y, limit)
        if offset is not None:
            y = y + offset
        grad = grad_out[rows, cols].float()
        value, slope = activate(x, alpha, exact, tanh)
        grad_x, grad_y = grad * y * slope, grad * value
        if limit is not None:
            grad_x = torch.where(given_x <= limit, grad_x, 0.0)
            grad_y = torch.where(torch.abs(given_y) <= limit, grad_y, 0.0)
        write(rows, cols, grad_gate, grad_up, up is None, grad_x, grad_y)


def kernels(op: str) -> tuple[Kernel[..., None], Kernel[..., None]]:
    """Both, with configurations of an op's own."""
    return (
        kernel(tile_config, sizes, name=f"{op}_fwd_kernel")(glu_fwd_kernel),
        kernel(tile_config, sizes, name=f"{op}_bwd_kernel")(glu_bwd_kernel),
    )


def in_eights(*tensors: Maybe) -> list[Any]:
    """All in rows of eight, if they are contiguous: then no width is too narrow for a tile, and no mask divides 16 bytes."""
    lead = tensors[0]
    if lead is None or not all(t is None or t.is_contiguous() for t in tensors):
        return [*tensors, None]
    eights = lead.numel() % 8 == 0 or None
    rows = lead.numel() // 8 if eights else 1
    return [*(None if t is None else t.view(rows, -1) for t in tensors), eights]


def glu_fwd(kernel: Kernel[..., None], gate: Tensor, up: Maybe, interleaved: bool, *options: Any) -> Tensor:
    out = empty_out(gate, up)
    kernel(*in_eights(out, *((gate, None) if interleaved else split(gate, up, False))), *options)
    return out


def glu_bwd(
    kernel: Kernel[..., None], grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, needs: list[bool], *options: Any
) -> tuple[Maybe, Maybe]:
    grad_gate = torch.empty_like(gate) if needs[0] else None
    grad_up = torch.empty_like(up) if up is not None and needs[1] else None
    if up is not None or interleaved:
        kernel(*in_eights(grad_out, gate, up, grad_gate, grad_up), *options)
    elif grad_gate is not None:
        kernel(*in_eights(grad_out, *split(gate, None, False), *split(grad_gate, None, False)), *options)
    return grad_gate, grad_up

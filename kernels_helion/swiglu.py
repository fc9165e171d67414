"""SwiGLU: elementwise over tiles in any strides, or over rows of eight where everything is contiguous."""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference.swiglu import op, split

from ._kernel import kernel, next_power_of_2, rows_and_columns

Maybe = Tensor | None


def column_major(*tensors: Any) -> bool:
    return any(isinstance(t, Tensor) and t.stride(0) == 1 for t in tensors)


def sizes(*tensors: Any) -> dict[str, int]:
    return {**rows_and_columns(*tensors), "column_major": column_major(*tensors)}


def tile_config(out: Tensor, *others: Any, tile: int = 1024) -> dict[str, Any]:
    M, N = out.shape
    # Powers of two that divide N leave no lane idle; a column-major tensor wants rows side by side.
    wide = tile if M == 1 else 32 if column_major(out, *others) else max(N & -N, 256)
    # A dimension of 1 takes a block of 1: Helion 1.5.0 lets every lane store to it, those beyond the end too.
    block_n = min(wide, next_power_of_2(N), tile)
    return {"block_sizes": [1 if M == 1 else tile // block_n, block_n], "loop_orders": [[1, 0]], "num_warps": 4}


@kernel(tile_config, sizes)
def swiglu_fwd_kernel(out: Tensor, gate: Tensor, up: Maybe, eights: bool | None) -> None:
    m, n = out.size()
    if eights is not None:
        n = hl.specialize(n)  # Nor would alignment be known without the strides.
        hl.specialize((out.stride(0), gate.stride(0)))
        if up is not None:
            _ = hl.specialize(up.stride(0))
    for rows, cols in hl.tile([m, n]):
        if up is None:
            x, y = hl.split(gate[rows, 2 * cols.index[:, None] + hl.arange(2)].float())
        else:
            x, y = gate[rows, cols].float(), up[rows, cols].float()
        out[rows, cols] = (x * torch.sigmoid(x) * y).to(out.dtype)


@kernel(tile_config, sizes)
def swiglu_bwd_kernel(
    grad_out: Tensor, gate: Tensor, up: Maybe, grad_gate: Maybe, grad_up: Maybe, eights: bool | None
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
        if up is None:
            x, y = hl.split(gate[rows, 2 * cols.index[:, None] + hl.arange(2)].float())
        else:
            x, y = gate[rows, cols].float(), up[rows, cols].float()
        grad, sigmoid = grad_out[rows, cols].float(), torch.sigmoid(x)
        grad_x, grad_y = grad * y * sigmoid * (1 + x * (1 - sigmoid)), grad * x * sigmoid
        if grad_gate is not None:
            if up is None:
                grad_gate[rows, 2 * cols.index[:, None] + hl.arange(2)] = hl.join(grad_x, grad_y).to(gate.dtype)
            else:
                grad_gate[rows, cols] = grad_x.to(gate.dtype)
        if grad_up is not None:
            grad_up[rows, cols] = grad_y.to(gate.dtype)


def in_eights(*tensors: Maybe) -> list[Any]:
    """All in rows of eight, if they are contiguous: then no width is too narrow for a tile, and no mask divides 16 bytes."""
    lead = tensors[0]
    if lead is None or not all(t is None or t.is_contiguous() for t in tensors):
        return [*tensors, None]
    eights = lead.numel() % 8 == 0 or None
    rows = lead.numel() // 8 if eights else 1
    return [*(None if t is None else t.view(rows, -1) for t in tensors), eights]


def swiglu_fwd(gate: Tensor, up: Maybe, interleaved: bool) -> Tensor:
    out = op.outputs["out"](gate, up, interleaved)
    swiglu_fwd_kernel(*in_eights(out, *((gate, None) if interleaved else split(gate, up, False))))
    return out


def swiglu_bwd(grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, needs: list[bool]) -> tuple[Maybe, Maybe]:
    grad_gate = torch.empty_like(gate) if needs[0] else None
    grad_up = torch.empty_like(up) if up is not None and needs[1] else None
    if up is not None or interleaved:
        swiglu_bwd_kernel(*in_eights(grad_out, gate, up, grad_gate, grad_up))
    elif grad_gate is not None:
        swiglu_bwd_kernel(*in_eights(grad_out, *split(gate, None, False), *split(grad_gate, None, False)))
    return grad_gate, grad_up


swiglu = op.implement(swiglu_fwd, swiglu_bwd)

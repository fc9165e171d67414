"""What the gated activations share: tiles and configurations, how kernels read and write, how they are called."""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._glu import Maybe, empty_out, split

from ._kernel import Kernel, next_power_of_2, rows_and_columns


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


def read(rows: Any, cols: Any, gate: Tensor, up: Maybe) -> tuple[Tensor, Tensor]:
    if up is None:
        return hl.split(hl.load(gate, [rows, 2 * cols.index.unsqueeze(1) + hl.arange(2)]).float())
    return hl.load(gate, [rows, cols]).float(), hl.load(up, [rows, cols]).float()


def write(rows: Any, cols: Any, grad_gate: Maybe, grad_up: Maybe, packed: bool, x: Tensor, y: Tensor) -> None:
    if packed and grad_gate is not None:
        hl.store(grad_gate, [rows, 2 * cols.index.unsqueeze(1) + hl.arange(2)], hl.join(x, y).to(grad_gate.dtype))
    elif grad_gate is not None:
        hl.store(grad_gate, [rows, cols], x.to(grad_gate.dtype))
    if grad_up is not None:
        hl.store(grad_up, [rows, cols], y.to(grad_up.dtype))


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

"""Rows of a table: a copy forward; backward each row that is named adds what its places were given."""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference.embedding import by_row, empty_out, op, row_of_padding

from ._kernel import kernel, next_power_of_2


def sizes(index: Tensor, weight: Tensor, *_: Any) -> dict[str, int]:
    return {"M": index.size(0), "D": weight.size(1), "itemsize": weight.itemsize}


def fwd_config(index: Tensor, weight: Tensor, *_: Any) -> dict[str, Any]:
    width = min(next_power_of_2(weight.size(1)), 4096)
    rows = max(1, min(4096 // width, next_power_of_2(index.size(0)) // 512, 16))
    return {"block_sizes": [rows, width], "num_warps": min(max(rows * width // 512, 1), 8)}


def bwd_config(rows: Tensor, order: Tensor, begin: Tensor, end: Tensor, grad_out: Tensor, *_: Any) -> dict[str, Any]:
    width = min(next_power_of_2(grad_out.size(1)), 1024)
    return {"block_sizes": [width, 4], "num_warps": min(max(width // 256, 1), 4)}


@kernel(fwd_config, sizes)
def embedding_fwd_kernel(index: Tensor, weight: Tensor, out: Tensor) -> None:
    V = weight.size(0)
    for rows, cols in hl.tile([index.size(0), weight.size(1)]):
        i = index[rows].long()
        known = (i >= 0) & (i < V)
        value = hl.load(weight, [torch.where(known, i, 0), cols])
        out[rows, cols] = torch.where(known[:, None], value, float("nan"))


@kernel(bwd_config, lambda rows, order, begin, end, grad_out, *_: sizes(rows, grad_out))
def embedding_bwd_kernel(
    rows: Tensor, order: Tensor, begin: Tensor, end: Tensor, grad_out: Tensor, grad_weight: Tensor, padding: int
) -> None:
    """The first of the places of a row adds all of them up; see by_row for these."""
    V = grad_weight.size(0)
    for first, cols in hl.tile([rows.size(0), grad_weight.size(1)], block_size=[1, None]):
        row = rows[first.begin].long()
        adds = (begin[first.begin] == first.begin) & (row != padding) & (row >= 0) & (row < V)
        total = hl.zeros([cols])
        for places in hl.tile(first.begin, torch.where(adds, end[first.begin], first.begin)):
            total = total + hl.load(grad_out, [order[places], cols]).float().sum(dim=0)
        hl.store(grad_weight, [row, cols], total.to(grad_weight.dtype), extra_mask=adds)


def embedding_fwd(index: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    out = empty_out(index, weight)
    embedding_fwd_kernel(index.reshape(-1), weight, out.view(-1, weight.size(1)))
    return out


def embedding_bwd(grad_out: Tensor, index: Tensor, weight: Tensor, padding_idx: int | None, needs: list[bool]) -> tuple[Tensor]:
    grad_weight, grad_out = torch.zeros_like(weight), grad_out.reshape(-1, weight.size(1))
    embedding_bwd_kernel(*by_row(index), grad_out, grad_weight, row_of_padding(weight, padding_idx))
    return (grad_weight,)


embedding = op.implement(embedding_fwd, embedding_bwd)

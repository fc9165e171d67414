"""Softmax: a row stays on the chip where it fits, and is read twice where it does not."""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference.softmax import op

from ._kernel import kernel, row_config

WHOLE_ROW = 16384


def looped_config(x: Tensor, *_: Any) -> dict[str, Any]:
    return {"block_sizes": [1, 8192, 8192], "num_warps": 16}


@kernel(lambda x: row_config(x, most=WHOLE_ROW))
def softmax_whole(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        out[rows, :] = torch.softmax(x[rows, :].float(), dim=-1).to(out.dtype)
    return out


@kernel(looped_config)
def softmax_looped(x: Tensor) -> Tensor:
    m, n = x.size()
    out = torch.empty_like(x)
    for rows in hl.tile(m):
        running_max = hl.full([rows], float("-inf"), dtype=torch.float32)
        running_sum = hl.zeros([rows], dtype=torch.float32)
        for cols in hl.tile(n):
            block = x[rows, cols].float()
            new_max = torch.maximum(running_max, torch.amax(block, dim=1))
            # A row that begins with -inf has no finite maximum yet; subtracting it from itself would make NaN.
            shift = torch.where(new_max == float("-inf"), 0.0, new_max)
            running_sum = running_sum * torch.exp(running_max - shift) + torch.exp(block - shift[:, None]).sum(dim=1)
            running_max = new_max
        for cols in hl.tile(n):
            block = x[rows, cols].float()
            out[rows, cols] = (torch.exp(block - running_max[:, None]) / running_sum[:, None]).to(out.dtype)
    return out


@kernel(lambda grad_out, out: row_config(out))
def softmax_bwd(grad_out: Tensor, out: Tensor) -> Tensor:
    grad_x = torch.empty_like(out)
    for rows in hl.tile(out.size(0)):
        y = out[rows, :].float()
        g = grad_out[rows, :].float()
        grad_x[rows, :] = (y * (g - (g * y).sum(dim=-1, keepdim=True))).to(grad_x.dtype)
    return grad_x


def softmax_fwd(x: Tensor) -> Tensor:
    return softmax_whole(x) if x.size(1) <= WHOLE_ROW else softmax_looped(x)


softmax = op.implement(softmax_fwd, softmax_bwd)

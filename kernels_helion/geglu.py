"""GeGLU: elementwise over tiles in any strides, or over rows of eight where everything is contiguous."""

import math

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._glu import Maybe
from kernels_reference.geglu import Approximate, op

from ._glu import glu_bwd, glu_fwd, read, sizes, tile_config, write
from ._kernel import kernel


def gelu(x: Tensor, tanh: bool | None) -> tuple[Tensor, Tensor]:
    """The activation, and its derivative."""
    if tanh is None:
        share = 0.5 + 0.5 * torch.erf(x * math.sqrt(0.5))
        return x * share, share + x * (1 / math.sqrt(2 * math.pi)) * torch.exp(-0.5 * x * x)
    # (1 + tanh(u)) / 2 is sigmoid(2 * u), which loses nothing to cancellation.
    linear, square = 2 * math.sqrt(2 / math.pi), x * x
    share = torch.sigmoid(x * (linear + 0.044715 * linear * square))
    return x * share, share + share * (1 - share) * x * (linear + 3 * 0.044715 * linear * square)


@kernel(tile_config, sizes)
def geglu_fwd_kernel(out: Tensor, gate: Tensor, up: Maybe, eights: bool | None, tanh: bool | None) -> None:
    m, n = out.size()
    if eights is not None:
        n = hl.specialize(n)  # Nor would alignment be known without the strides.
        hl.specialize((out.stride(0), gate.stride(0)))
        if up is not None:
            _ = hl.specialize(up.stride(0))
    for rows, cols in hl.tile([m, n]):
        x, y = read(rows, cols, gate, up)
        value = gelu(x, tanh)[0]
        out[rows, cols] = (value * y).to(out.dtype)


@kernel(tile_config, sizes)
def geglu_bwd_kernel(
    grad_out: Tensor, gate: Tensor, up: Maybe, grad_gate: Maybe, grad_up: Maybe, eights: bool | None, tanh: bool | None
) -> None:
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
        x, y = read(rows, cols, gate, up)
        grad = grad_out[rows, cols].float()
        value, slope = gelu(x, tanh)
        write(rows, cols, grad_gate, grad_up, up is None, grad * y * slope, grad * value)


def geglu_fwd(gate: Tensor, up: Maybe, interleaved: bool, approximate: Approximate) -> Tensor:
    return glu_fwd(geglu_fwd_kernel, gate, up, interleaved, approximate == "tanh" or None)


def geglu_bwd(
    grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, approximate: Approximate, needs: list[bool]
) -> tuple[Maybe, Maybe]:
    return glu_bwd(geglu_bwd_kernel, grad_out, gate, up, interleaved, needs, approximate == "tanh" or None)


geglu = op.implement(geglu_fwd, geglu_bwd)

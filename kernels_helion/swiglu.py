"""SwiGLU: elementwise over tiles in any strides, or over rows of eight where everything is contiguous."""

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._glu import Maybe
from kernels_reference.swiglu import Option, in_use, op

from ._glu import glu_bwd, glu_fwd, read, sizes, tile_config, write
from ._kernel import kernel


def silu(x: Tensor, alpha: Option) -> tuple[Tensor, Tensor]:
    """`x * sigmoid(alpha * x)`, and its derivative."""
    scaled = x if alpha is None else alpha * x
    sigmoid = torch.sigmoid(scaled)
    return x * sigmoid, sigmoid * (1 + scaled * (1 - sigmoid))


def clamp(x: Tensor, y: Tensor, limit: Option) -> tuple[Tensor, Tensor]:
    # NaN stays, since it compares as false; torch.clamp would ask for it besides.
    if limit is not None:
        x = torch.where(x > limit, limit, x)
        y = torch.where(y > limit, limit, torch.where(y < -limit, -limit, y))
    return x, y


@kernel(tile_config, sizes)
def swiglu_fwd_kernel(
    out: Tensor, gate: Tensor, up: Maybe, eights: bool | None, alpha: Option, limit: Option, offset: Option
) -> None:
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
        value = silu(x, alpha)[0]
        out[rows, cols] = (value * y).to(out.dtype)


@kernel(tile_config, sizes)
def swiglu_bwd_kernel(
    grad_out: Tensor, gate: Tensor, up: Maybe, grad_gate: Maybe, grad_up: Maybe, eights: bool | None,
    alpha: Option, limit: Option, offset: Option,
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
        value, slope = silu(x, alpha)
        grad_x, grad_y = grad * y * slope, grad * value
        if limit is not None:
            grad_x = torch.where(given_x <= limit, grad_x, 0.0)
            grad_y = torch.where(torch.abs(given_y) <= limit, grad_y, 0.0)
        write(rows, cols, grad_gate, grad_up, up is None, grad_x, grad_y)


def swiglu_fwd(gate: Tensor, up: Maybe, interleaved: bool, alpha: float, limit: Option, offset: float) -> Tensor:
    return glu_fwd(swiglu_fwd_kernel, gate, up, interleaved, *in_use(alpha, limit, offset))


def swiglu_bwd(
    grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, alpha: float, limit: Option, offset: float, needs: list[bool]
) -> tuple[Maybe, Maybe]:
    return glu_bwd(swiglu_bwd_kernel, grad_out, gate, up, interleaved, needs, *in_use(alpha, limit, offset))


swiglu = op.implement(swiglu_fwd, swiglu_bwd)

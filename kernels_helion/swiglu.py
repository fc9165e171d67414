"""SwiGLU: gated activations with silu, and gpt-oss's options."""

from torch import Tensor

from kernels_reference._glu import Maybe
from kernels_reference.swiglu import Option, in_use, op

from ._glu import glu_bwd, glu_fwd, kernels

swiglu_fwd_kernel, swiglu_bwd_kernel = kernels("swiglu")


def swiglu_fwd(gate: Tensor, up: Maybe, interleaved: bool, alpha: float, limit: Option, offset: float) -> Tensor:
    return glu_fwd(swiglu_fwd_kernel, gate, up, interleaved, *in_use(alpha, limit, offset), None, None)


def swiglu_bwd(
    grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, alpha: float, limit: Option, offset: float, needs: list[bool]
) -> tuple[Maybe, Maybe]:
    return glu_bwd(swiglu_bwd_kernel, grad_out, gate, up, interleaved, needs, *in_use(alpha, limit, offset), None, None)


swiglu = op.implement(swiglu_fwd, swiglu_bwd)

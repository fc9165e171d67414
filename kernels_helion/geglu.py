"""GeGLU: gated activations with gelu, exact or by tanh."""

from torch import Tensor

from kernels_reference._glu import Maybe
from kernels_reference.geglu import Approximate, op

from ._glu import glu_bwd, glu_fwd, kernels

geglu_fwd_kernel, geglu_bwd_kernel = kernels("geglu")
OPTIONS = {"none": (None, None, None, True, None), "tanh": (None, None, None, None, True)}


def geglu_fwd(gate: Tensor, up: Maybe, interleaved: bool, approximate: Approximate) -> Tensor:
    return glu_fwd(geglu_fwd_kernel, gate, up, interleaved, *OPTIONS[approximate])


def geglu_bwd(
    grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, approximate: Approximate, needs: list[bool]
) -> tuple[Maybe, Maybe]:
    return glu_bwd(geglu_bwd_kernel, grad_out, gate, up, interleaved, needs, *OPTIONS[approximate])


geglu = op.implement(geglu_fwd, geglu_bwd)

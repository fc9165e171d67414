"""GeGLU: gated activations with gelu, exact or by tanh."""

from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference._glu import Maybe
from kernels_reference.geglu import Approximate, op

from ._glu import SPACE, glu_bwd, glu_fwd
from ._launch import configured

ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


@configured(**SPACE)
def geglu_fwd_config(where: Gpu, M: int, N: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 1024, "num_warps": 4}


@configured(**SPACE)
def geglu_bwd_config(where: Gpu, M: int, N: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 1024, "num_warps": 4}


def geglu_fwd(gate: Tensor, up: Maybe, interleaved: bool, approximate: Approximate) -> Tensor:
    return glu_fwd(geglu_fwd_config, gate, up, interleaved, None, None, None, ACTIVATIONS[approximate])


def geglu_bwd(
    grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, approximate: Approximate, needs: list[bool]
) -> tuple[Maybe, Maybe]:
    options = None, None, None, ACTIVATIONS[approximate]
    return glu_bwd(geglu_bwd_config, grad_out, gate, up, interleaved, needs, *options)


geglu = op.implement(geglu_fwd, geglu_bwd)

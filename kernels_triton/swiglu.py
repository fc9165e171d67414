"""SwiGLU: gated activations with silu, and gpt-oss's options."""

from torch import Tensor

from kernels_reference._config import Gpu
from kernels_reference._glu import Maybe
from kernels_reference.swiglu import Option, in_use, op

from ._glu import SPACE, glu_bwd, glu_fwd
from ._launch import configured


@configured(**SPACE)
def swiglu_fwd_config(where: Gpu, M: int, N: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 1024, "num_warps": 4}


@configured(**SPACE)
def swiglu_bwd_config(where: Gpu, M: int, N: int, itemsize: int, column_major: bool) -> dict[str, int]:
    return {"TILE": 1024, "num_warps": 4}


def swiglu_fwd(gate: Tensor, up: Maybe, interleaved: bool, alpha: float, limit: Option, offset: float) -> Tensor:
    return glu_fwd(swiglu_fwd_config, gate, up, interleaved, *in_use(alpha, limit, offset), "silu")


def swiglu_bwd(
    grad_out: Tensor, gate: Tensor, up: Maybe, interleaved: bool, alpha: float, limit: Option, offset: float, needs: list[bool]
) -> tuple[Maybe, Maybe]:
    return glu_bwd(swiglu_bwd_config, grad_out, gate, up, interleaved, needs, *in_use(alpha, limit, offset), "silu")


swiglu = op.implement(swiglu_fwd, swiglu_bwd)

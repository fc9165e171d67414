"""Generalised Jensen-Shannon divergence, by the kernels that it shares with Kullback and Leibler's."""

from functools import partial

from kernels_reference._config import Gpu
from kernels_reference._divergence import jsd_host
from kernels_reference.jsd import op

from ._divergence import SPACE, backward, bwd_config, forward, fwd_config
from ._launch import configured


@configured(**SPACE)
def jsd_fwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    return fwd_config(where, M, V, itemsize)


@configured(**SPACE)
def jsd_bwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    return bwd_config(where, M, V, itemsize)


jsd = op.implement(
    *jsd_host(partial(forward, jsd_fwd_config), partial(backward, (jsd_fwd_config, jsd_bwd_config))), module=__name__
)

"""Kullback-Leibler divergence, by the kernels that it shares with Jensen-Shannon's."""

from functools import partial

from kernels_reference._config import Gpu
from kernels_reference._divergence import kl_div_host
from kernels_reference.kl_div import op

from ._divergence import SPACE, backward, bwd_config, forward, fwd_config
from ._launch import configured


@configured(**SPACE)
def kl_div_fwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    return fwd_config(where, M, V, itemsize)


@configured(**SPACE)
def kl_div_bwd_config(where: Gpu, M: int, V: int, itemsize: int) -> dict[str, int]:
    return bwd_config(where, M, V, itemsize)


kl_div = op.implement(
    *kl_div_host(partial(forward, kl_div_fwd_config), partial(backward, (kl_div_fwd_config, kl_div_bwd_config))),
    module=__name__,
)

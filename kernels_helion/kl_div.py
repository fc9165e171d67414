"""Kullback-Leibler divergence, by the kernels that it shares with Jensen-Shannon's."""

from functools import partial

from kernels_reference._divergence import kl_div_host
from kernels_reference.kl_div import op

from ._divergence import backward, forward, kernels

KERNELS = kl_div_kernel, kl_div_reduce_kernel, kl_div_bwd_kernel = kernels("kl_div")

kl_div = op.implement(*kl_div_host(partial(forward, KERNELS), partial(backward, KERNELS)), module=__name__)

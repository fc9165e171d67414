"""Generalised Jensen-Shannon divergence, by the kernels that it shares with Kullback and Leibler's."""

from functools import partial

from kernels_reference._divergence import jsd_host
from kernels_reference.jsd import op

from ._divergence import backward, forward, kernels

KERNELS = jsd_kernel, jsd_reduce_kernel, jsd_bwd_kernel = kernels("jsd")

jsd = op.implement(*jsd_host(partial(forward, KERNELS), partial(backward, KERNELS)), module=__name__)

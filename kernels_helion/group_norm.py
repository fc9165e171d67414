"""Group norm: a group that fits stays on the chip; of others, each channel is summed up, then all is read again."""

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference._group_norm import Opt, host, is_whole, split
from kernels_reference.group_norm import op

from ._group_norm import group_norm_columns_kernel, group_norm_combine_kernel, group_norm_kernel
from ._kernel import next_power_of_2


def normalise(
    x: Tensor, grad: Opt, G: int, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, eps: float | None, out: Opt,
    grads: tuple[Opt, Opt],
) -> None:  # fmt: skip
    (N, C, P), K = x.shape, x.shape[1] // G
    together = all(t is None or N == 1 or t.stride(0) == C * t.stride(1) for t in (x, grad, out))
    whole, height, length, splits = (together or G == 1) and is_whole(x, K), next_power_of_2(K), P, 1
    if not whole:
        height, length, splits = split(x, tile=4096, programs=8 * gpu(x.get_device()).processors)
    A = G if whole else 1
    M, B = N * A, C // A
    groups, columns = not whole and out is not None, grads != (None, None)
    ones, twos = (mean.new_empty(splits, M, B) if groups or columns else None for _ in range(2))
    of_rows = x.view(M, B, P), None if grad is None else grad.view(M, B, P), weight, bias
    sums = (None, None) if ones is None or twos is None else (ones.view(-1, B), twos.view(-1, B))
    room = None if out is None else out.view(M, B, P)
    rest = A, K, 0.0 if eps is None else eps, height, length, G // A
    stats, none = (mean.view(-1), rstd.view(-1)), (None, None)
    known, new = (none, stats) if grad is None else (stats, none)
    mode = hl.constexpr("whole" if whole else "sums")
    group_norm_kernel(*of_rows, *known, *none, *new, *sums, room if whole else None, mode, *rest)
    if ones is None or twos is None:
        return
    if groups:
        new = stats if grad is None else (torch.empty_like(stats[0]), torch.empty_like(stats[0]))
        of_groups = ones.view(splits, N * G, K), twos.view(splits, N * G, K)
        group_norm_combine_kernel(*of_groups, weight, *new, G, P, length, eps)
        mode = hl.constexpr("apply")
        group_norm_kernel(*of_rows, *stats, *(none if grad is None else new), *none, *none, room, mode, *rest)
    if columns:
        group_norm_columns_kernel(ones.view(-1, C), twos.view(-1, C), *grads)


group_norm = op.implement(*host(normalise), module=__name__)

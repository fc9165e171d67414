"""Group norm: a group that fits stays on the chip; of others, each channel is summed up, then all is read again."""

import torch
import triton
from torch import Tensor

from kernels_reference._config import gpu
from kernels_reference._group_norm import Opt, host, is_whole, side_by_side, split
from kernels_reference.group_norm import op

from ._group_norm import group_norm_combine_kernel, group_norm_kernel, group_norm_split_config, group_norm_whole_config
from ._launch import launch, next_power_of_2
from ._norm import strided


def normalise(
    x: Tensor, grad: Opt, G: int, weight: Opt, bias: Opt, mean: Tensor, rstd: Tensor, eps: float | None, out: Opt,
    grads: tuple[Opt, Opt],
) -> None:  # fmt: skip
    (N, C, P), K = x.shape, x.shape[1] // G
    device, whole = x.get_device(), is_whole(x, K)
    if whole:
        config = group_norm_whole_config(device, N * G, K, P, x.itemsize)
        block_c, block_p, length, splits = next_power_of_2(K), config["BLOCK_P"], P, 1
    else:
        config = group_norm_split_config(device, N, C, P, x.itemsize, side_by_side(x))
        block_c, length, splits = split(x, tile=config["TILE"], programs=config["PROGRAMS"] * gpu(device).processors)
        block_p = config["TILE"] // block_c
    block_p = min(block_p, next_power_of_2(P))
    programs = N * splits * (G if whole else triton.cdiv(C, block_c))
    groups, columns = 0 if whole or out is None else N * G, 0 if grads == (None, None) else triton.cdiv(C, 32)
    sums = means = none = None, None
    if columns or groups:
        sums = mean.new_empty(N, splits, C), mean.new_empty(N, splits, C)
    scale, shift = strided(weight, dims=1), strided(bias, dims=1)

    def walk(mode: str, means: tuple[Opt, Opt], sums: tuple[Opt, Opt], out: Opt) -> None:
        launch(
            group_norm_kernel, (programs,), x, *x.stride(), *strided(grad, dims=3), *scale, *shift, mean, rstd, *means, *sums,
            *strided(out, dims=3), C, P, G, K, splits, length, eps, mode, block_c, block_p, block_p < length,
            num_warps=config["num_warps"],
        )  # fmt: skip

    walk("whole" if whole else "sums", none, sums, out if whole else None)
    if columns or groups:
        if groups:
            means = (mean, rstd) if grad is None else (torch.empty_like(mean), torch.empty_like(mean))
        launch(
            group_norm_combine_kernel, (groups + columns,), *sums, *scale, *means, *grads, N, C, P, G, K, splits, length, eps,
            64, 32, num_warps=8,
        )  # fmt: skip
    if groups:
        walk("apply", none if grad is None else means, none, out)


group_norm = op.implement(*host(normalise), module=__name__)

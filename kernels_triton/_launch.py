"""Launching kernels, and choosing their configurations."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels_reference import _replay
from kernels_reference._config import Choice, Config, Store
from kernels_reference._config import next_power_of_2 as next_power_of_2
from kernels_reference._op import INTERPRET

# Triton 3.9 warns, at a first compilation, that 3.10 will no longer contract products and sums unless it is told to.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if INTERPRET:
    from kernels_reference._interpreter import fill_in

    fill_in()

STORE = Store("kernels_triton", Path(__file__).parent / "configs")


def configured(**space: tuple[int, ...]) -> Callable[[Callable[..., Config]], Choice]:
    """A rule gives a sound configuration for a GPU and sizes; the choice is what is tuned, else that. A tuner tries `space`."""
    return lambda rule: Choice(STORE, rule, space)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 3) -> None:
    _replay.launch(_run, kernel, grid, *arguments, num_warps=num_warps, num_stages=num_stages)


def _run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    return kernel[grid](*arguments, **options)


def tile_width(N: int, tile: int, column_major: bool) -> int:
    """Of a tile of `tile` elements. Powers of two that divide N leave no lane idle; column-major, rows lie side by side."""
    return min(32 if column_major else max(N & -N, 256), next_power_of_2(N), tile)


def row_blocks(M: int, N: int, *, most: int, looped: int = 8192) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and warps for a row-wise kernel.

    One tile holds whole rows up to `most` elements; longer rows are walked in steps of `looped`. Short rows share a tile
    of about 4096 elements, as far as there are rows enough to fill the GPU.
    """
    width = next_power_of_2(N)
    if width > most:
        return 1, looped, looped // 512
    rows = max(1, min(4096 // width, next_power_of_2(M) // 512, 64))
    return rows, width, min(max(rows * width // 512, 1), 32)

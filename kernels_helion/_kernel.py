"""`@kernel(config)`: a Helion kernel that never tunes itself.

A call picks its configuration from the shapes of its arguments, once for each shape; kernels are shared between all
shapes with the same configuration.
"""

import functools
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels_reference._op import INTERPRET

try:
    import helion
except Exception as error:
    found = {
        name: metadata.version(name) if metadata.packages_distributions().get(name) else "no" for name in ("helion", "torch")
    }
    raise ImportError(
        f"kernels_helion cannot use helion {found['helion']} with torch {found['torch']} ({type(error).__name__}: {error}). "
        "Pairs that work: helion 1.5.1 with torch 2.13 or newer, helion 1.5.0 with torch 2.11"
    ) from error

# Triton 3.9 warns, at a first compilation, that 3.10 will no longer contract products and sums unless it is told to.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if INTERPRET:
    from kernels_reference._interpreter import fill_in, processors

    fill_in()
    processors()

P = ParamSpec("P")
R = TypeVar("R")
Config = Mapping[str, Any]


class Kernel(Generic[P, R]):
    """A Helion kernel with the configuration that `choose` returns for its arguments."""

    def __init__(self, fn: Callable[P, R], choose: Callable[P, Config]) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.choose = fn, choose
        self.variants: dict[str, helion.Kernel[R]] = {}
        self._by_layout: dict[tuple[Any, ...], helion.Kernel[R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        layout = tuple((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else None for a in args)
        variant = self._by_layout.get(layout)
        if variant is None:
            # Helion reads `.grad` of what it binds, which warns for a saved output; and it looks at which arguments are one.
            once = {id(a): a.detach() for a in args if isinstance(a, Tensor)}
            detached = tuple(once.get(id(a), a) for a in args)
            variant = self._by_layout[layout] = self.variant(*detached)
            variant.bind(detached)
        return variant(*args)

    def variant(self, *args: Any) -> "helion.Kernel[R]":
        """The kernel that a call with these arguments takes."""
        config = self.choose(*args)  # type: ignore[call-arg]
        tensors = [a for a in args if isinstance(a, Tensor)]
        # Helion builds sizes of 1 into the code, whatever sizes it meets first; it must not meet them for another shape.
        ones = [[n == 1 for n in t.shape] for t in tensors]
        # 64-bit indices are decided here: Helion looks at numbers of elements, not at what strides span or outputs need.
        index_dtype = torch.int64 if any(_span(t) >= 2**30 for t in tensors) else torch.int32
        key = f"{index_dtype} {ones} {sorted(config.items())}"
        if key not in self.variants:
            settings: dict[str, Any] = {"static_shapes": False, "index_dtype": index_dtype, "autotune_effort": "none"}
            if any(map(any, ones)):
                config = _fit(config, helion.kernel(self.fn, **settings).bind(args).config_spec)
            self.variants[key] = helion.kernel(self.fn, config=helion.Config(**config), **settings)
        return self.variants[key]


def kernel(choose: Callable[..., Config]) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Decorates a Helion kernel; `choose` maps its arguments to a configuration."""
    return lambda fn: Kernel(fn, choose)


def _span(t: Tensor) -> int:
    """One more than the largest offset of an element from the first."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _fit(config: Config, spec: Any) -> dict[str, Any]:
    """The configuration without the entries for loops that a size of 1 has removed, and blocks of 1 for such sizes.

    Helion 1.5.0 does not mask stores to a size of 1: lanes beyond it would write to its only element.
    """
    fitted = {k: v[: len(getattr(spec, k))] if isinstance(v, list) else v for k, v in config.items()}
    fitted["block_sizes"] = [1 if s.size_hint == 1 else b for b, s in zip(config["block_sizes"], spec.block_sizes, strict=True)]
    return fitted


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def row_config(x: Tensor, *, most: int = 16384, looped: int = 4096) -> dict[str, Any]:
    """For a kernel over whole rows of `x` (M, N): rows to a tile, and a looped reduction where a row is too long."""
    M, N = x.shape
    width = next_power_of_2(N)
    if width > most:
        return {"block_sizes": [1], "reduction_loops": [looped], "num_warps": looped // 512}
    rows = max(1, min(4096 // width, next_power_of_2(M) // 512, 64))
    return {"block_sizes": [rows], "reduction_loops": [None], "num_warps": min(max(rows * width // 512, 1), 32)}

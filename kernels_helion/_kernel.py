"""`@kernel(rule)`: a Helion kernel that never tunes itself.

A call takes the configuration that was tuned for this GPU and sizes like its own, else the rule's; the same code is shared
by all shapes with the same configuration. Helion has hooks for this, `autotuner_fn` and `aot_kernel`, but they are asked at
each call: a small kernel costs the host 27 to 33 and 66 microseconds with them, where its launch alone takes 18.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels_reference import _replay
from kernels_reference._config import Config, Gpu, Store, Tunable, gpu
from kernels_reference._config import next_power_of_2 as next_power_of_2
from kernels_reference._op import INTERPRET
from kernels_reference._replay import layout

try:
    import helion
    from helion.autotuner.config_generation import ConfigGeneration
    from helion.runtime import default_launcher
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

STORE = Store("kernels_helion", Path(__file__).parent / "configs")
P = ParamSpec("P")
R = TypeVar("R")
Sizes = Callable[..., Mapping[str, int]]


def rows_and_columns(x: Tensor, *_: Any) -> dict[str, int]:
    return {"M": x.size(0), "N": x.size(1), "itemsize": x.itemsize}


class Kernel(Tunable, Generic[P, R]):
    """A Helion kernel; `rule` maps its arguments to a sound configuration, `sizes` to what configurations are tuned for."""

    def __init__(self, fn: Callable[P, R], rule: Callable[P, Config], sizes: Sizes, name: str | None = None) -> None:
        super().__init__(STORE, name or fn.__name__)
        functools.update_wrapper(self, fn)
        self.fn, self.rule, self._sizes = fn, rule, sizes
        self.variants: dict[str, helion.Kernel[R]] = {}
        self._runs: dict[Any, Callable[..., R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # Helion's own dispatch would look at all this again, and takes no launcher.
        key, _ = layout(args)
        run = self._runs.get(key)
        if run is None:
            run = self._compile(*args)
            if key is not None:
                self._runs[key] = run
        return run(*args, _launcher=_launch)

    def _compile(self, *args: Any) -> Callable[..., R]:
        # Helion reads `.grad` of what it binds, which warns for a saved output; and it looks at which arguments are one.
        once = {id(a): a.detach() for a in args if isinstance(a, Tensor)}
        asked = tuple(once.get(id(a), a) for a in args)
        self.note(*asked)
        where = gpu(args[0].get_device())

        def compiled(config: Config) -> Callable[..., R]:
            bound, ones = self._bound(config, asked)
            return bound.compile_config(helion.Config(**(_fit(config, bound.config_spec) if ones else config)))

        try:
            return compiled(self.choose(where, *asked))
        except helion.exc.InvalidConfig:
            if self.forced or not self.tuned(where, *asked):
                raise
            # It was tuned for another version of the kernel, or by another of Helion.
            return compiled(self.default(where, *asked))

    def config(self, *args: Any) -> Config:
        """The configuration of a call with these arguments, of which the first is a tensor."""
        return self.choose(gpu(args[0].get_device()), *args)

    def sizes(self, *asked: Any) -> Mapping[str, int]:
        return self._sizes(*asked)

    def default(self, where: Gpu, *asked: Any) -> Config:
        return self.rule(*asked)  # pyright: ignore[reportCallIssue]

    def neighbours(self, config: Config) -> Iterator[Config]:
        """One step in what Helion itself would tune; its own search keeps to no budget shorter than a generation."""
        spec = self._bound(config, self.asked or ())[0].config_spec
        space = ConfigGeneration(spec)
        flat = space.flatten(helion.Config(**config))
        for i, fragment in enumerate(space.flat_spec):
            for value in fragment.pattern_neighbors(flat[i]):
                if "block_ptr" in str(value):  # Triton 3.9 has none.
                    continue
                try:
                    found = space.unflatten([*flat[:i], value, *flat[i + 1 :]])
                except helion.exc.InvalidConfig:
                    continue
                # Without what is Helion's default for these sizes, unless it is named: for others it may differ.
                short = dict(found.minimize(spec))
                yield {name: v for name, v in dict(found).items() if name in short or name in config}

    def forget(self) -> None:
        self._runs.clear()

    def _bound(self, config: Config, args: Sequence[Any]) -> tuple[Any, bool]:
        """What Helion has made of the kernel for such arguments, whatever else is configured; and whether a size is 1."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        # Helion builds sizes of 1 into the code, whatever sizes it meets first; it must not meet them for another shape.
        ones = [[n == 1 for n in t.shape] for t in tensors]
        # 64-bit indices are decided here: Helion looks at numbers of elements, not at what strides span or outputs need.
        index_dtype = torch.int64 if any(_span(t) >= 2**30 for t in tensors) else torch.int32
        # A loop over a row that is longer than the first row it meets becomes no loop, for any row.
        key = f"{index_dtype} {ones} {config.get('reduction_loops')}"
        if key not in self.variants:
            settings: dict[str, Any] = {"static_shapes": False, "index_dtype": index_dtype, "autotune_effort": "none"}
            # Configurations come from elsewhere; these would build the number of processors into the code's key.
            settings["disable_autotuner_heuristics"] = True
            # A comparison of an argument with None counts as one.
            settings["ignore_warnings"] = [helion.exc.TensorOperationInWrapper]
            self.variants[key] = helion.kernel(self.fn, **settings)
        return self.variants[key].bind(tuple(args)), any(map(any, ones))


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    return _replay.launch(default_launcher, kernel, grid, *arguments, **options)


def kernel(
    rule: Callable[..., Config], sizes: Sizes = rows_and_columns, name: str | None = None
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Decorates a Helion kernel. Its configurations are kept under `name`, or its own."""
    return lambda fn: Kernel(fn, rule, sizes, name)


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


def column_major(*tensors: Any) -> bool:
    """Whether the rows of any of them, which need not all be tensors, lie side by side."""
    return any(isinstance(t, Tensor) and t.ndim > 1 and t.stride(-2) == 1 for t in tensors)


def tile_width(M: int, N: int, tile: int, column_major: bool) -> int:
    """Of a tile of `tile` elements. Powers of two that divide N leave no lane idle; column-major, rows lie side by side."""
    wide = tile if M == 1 else 32 if column_major else max(N & -N, 256)
    return min(wide, next_power_of_2(N), tile)


def row_config(x: Tensor, *, most: int = 16384, looped: int = 4096) -> dict[str, Any]:
    """For a kernel over whole rows of `x` (M, N): rows to a tile, and a looped reduction where a row is too long."""
    M, N = x.shape
    width = next_power_of_2(N)
    if width > most:
        return {"block_sizes": [1], "reduction_loops": [looped], "num_warps": looped // 512}
    rows = max(1, min(4096 // width, next_power_of_2(M) // 512, 64))
    return {"block_sizes": [rows], "reduction_loops": [None], "num_warps": min(max(rows * width // 512, 1), 32)}

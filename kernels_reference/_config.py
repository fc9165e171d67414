"""Which configuration a kernel takes: one tuned on this GPU for sizes like these, else one by rule.

Tuned configurations are data, a JSON file for each GPU in a package's `configs/`, written by `python -m bench tune`. They are
looked up by kernel and sizes, each size rounded up to a power of two. A GPU without a file takes one of the same architecture.
Files in the folder that HELION_KERNELS_CONFIGS names go before the package's own.
"""

import functools
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Config = Mapping[str, Any]
MANY = 1 << 13
"""From as many rows on, all numbers of rows are alike."""


@dataclass(frozen=True)
class Gpu:
    """What configurations depend on. A block may use `shared` bytes of shared memory and `warps` warps."""

    name: str
    arch: str
    processors: int
    shared: int
    warps: int


@functools.cache
def gpu(device: int) -> Gpu:
    """The GPU of this number; where there is none, what stands for one under Triton's interpreter."""
    if device < 0:
        return Gpu("interpreter", "none", 4, 64 << 10, 32)
    p = torch.cuda.get_device_properties(device)
    arch = p.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{p.major}{p.minor}"
    shared = 64 << 10 if torch.version.hip else p.shared_memory_per_block_optin
    return Gpu(p.name, arch, p.multi_processor_count, shared, 1024 // p.warp_size)


def bucket(sizes: Mapping[str, int]) -> str:
    """The name under which a configuration for these sizes is kept."""
    rounded = {n: 1 << (v - 1).bit_length() if v else 0 for n, v in sizes.items()}
    return " ".join(f"{n}={min(v, MANY) if n == 'M' else v}" for n, v in rounded.items())


class Store:
    """The tuned configurations of one package."""

    def __init__(self, package: str, folder: Path) -> None:
        self.package, self.folder = package, folder
        self._found: dict[Gpu, dict[str, dict[str, Config]]] = {}

    def of(self, where: Gpu) -> Mapping[str, Mapping[str, Config]]:
        """By kernel and bucket, the user's before the package's, those of this very GPU before its siblings'."""
        if where not in self._found:
            found: dict[str, dict[str, Config]] = {}
            for folder in (own_folder(self.package), self.folder):
                files = [read(path) for path in sorted(folder.glob("*.json"))] if folder and folder.is_dir() else []
                for file in sorted((f for f in files if f["arch"] == where.arch), key=lambda f: f["gpu"] != where.name):
                    for kernel, configs in file["kernels"].items():
                        found[kernel] = {**configs, **found.get(kernel, {})}
            self._found[where] = found
        return self._found[where]

    def forget(self) -> None:
        self._found.clear()


def own_folder(package: str) -> Path | None:
    name = os.environ.get("HELION_KERNELS_CONFIGS")
    return Path(name) / package if name else None


def read(path: Path) -> dict[str, Any]:
    """A file of configurations, refused by name if it is not one."""
    try:
        data = json.loads(path.read_text())
        kernels = data["kernels"]
        for name in ("gpu", "arch"):
            if not isinstance(data[name], str):
                raise ValueError(f"{name} must be a string")
        for kernel, configs in kernels.items():
            for sizes, config in configs.items():
                if not isinstance(config, dict) or not all(map(_plain, config.values())):
                    raise ValueError(f"{kernel}, {sizes}: a configuration must map names to numbers, strings or lists of them")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of configurations: {type(error).__name__}: {error}") from None
    return data


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, str)) or (isinstance(value, list) and all(map(_plain, value)))


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


class Tunable(ABC):
    """What a tuner sees of a kernel. `asked` are the arguments by which its latest new call, while it is watched, chose a
    configuration."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.forced: Config | None = None
        self.asked: tuple[Any, ...] | None = None
        self.watched = False

    def note(self, *asked: Any) -> None:
        """Keeps the arguments of a new call for who watches; for nobody, tensors among them would stay in memory."""
        self.asked = asked if self.watched else None

    @abstractmethod
    def sizes(self, *asked: Any) -> Mapping[str, int]:
        """What configurations are tuned for."""

    @abstractmethod
    def default(self, where: Gpu, *asked: Any) -> Config:
        """A sound configuration."""

    @abstractmethod
    def neighbours(self, config: Config) -> Iterator[Config]:
        """What differs from a configuration in one step of one thing."""

    @abstractmethod
    def forget(self) -> None:
        """Lets the next call choose anew."""

    def force(self, config: Config | None) -> None:
        """Every call takes this configuration from now on, or none its own again."""
        self.forced, self.asked = config, None
        self.forget()

    def tuned(self, where: Gpu, *asked: Any) -> Config | None:
        return self.store.of(where).get(self.name, {}).get(bucket(self.sizes(*asked)))

    def choose(self, where: Gpu, *asked: Any) -> Config:
        return self.forced or self.tuned(where, *asked) or self.default(where, *asked)


class Choice(Tunable):
    """The configuration of one kernel by a rule, a function of the GPU and sizes; a tuner tries the values of `space`."""

    def __init__(self, store: Store, rule: Callable[..., Config], space: Mapping[str, Sequence[Any]]) -> None:
        super().__init__(store, rule.__name__.removesuffix("_config"))
        self.rule, self.space = rule, space
        self.names = list(inspect.signature(rule).parameters)[1:]
        self._known: dict[tuple[int, ...], Config] = {}

    def __call__(self, device: int, *sizes: int) -> Config:
        config = self._known.get((device, *sizes))
        if config is None:
            self.note(*sizes)
            config = self._known[(device, *sizes)] = self.choose(gpu(device), *sizes)
        return config

    def sizes(self, *asked: int) -> Mapping[str, int]:
        return dict(zip(self.names, asked, strict=True))

    def default(self, where: Gpu, *asked: int) -> Config:
        return self.rule(where, *asked)

    def tuned(self, where: Gpu, *asked: int) -> Config | None:
        """None, too, where it is of another version of the kernel."""
        found = super().tuned(where, *asked)
        return found if found and found.keys() == self.rule(where, *asked).keys() else None

    def neighbours(self, config: Config) -> Iterator[Config]:
        for name, values in self.space.items():
            for i, value in enumerate(values):
                if value != config[name] and config[name] in values[max(i - 1, 0) : i + 2]:
                    yield {**config, name: value}

    def forget(self) -> None:
        self._known.clear()

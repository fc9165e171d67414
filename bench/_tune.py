"""The search behind `python -m bench tune`, and what `python -m bench config` prints."""

import ast
import contextlib
import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels_reference._accuracy import Oracle
from kernels_reference._config import Config, Gpu, Tunable, bucket, gpu, read
from kernels_reference._draw import Draw
from kernels_reference._op import Op

from . import _measure, offline

BETTER = 0.98
"""A configuration has to take less than this share of another's time to take its place."""


@dataclass(frozen=True)
class Case:
    """Arguments of an op: those of a workload, or of sizes such as `x=8192x4096 weight=4096 casting=llama`."""

    op: str
    what: str
    dtype: str = "bfloat16"

    @property
    def declaration(self) -> Op[Any]:
        return offline.load(self.op)

    def arguments(self, device: str) -> dict[str, Any]:
        op, draw = self.declaration, Draw(device, getattr(torch, self.dtype))
        if self.what in op.workloads:
            return op.workloads[self.what](draw)
        found: dict[str, Any] = {}
        for word in self.what.split():
            name, given, value = word.rpartition("=")
            name = name if given else op.arguments.names[0]
            if name not in op.arguments.position:
                raise ValueError(f"{self.op} has no argument {name!r}; it has {', '.join(op.arguments.names)}")
            kind = op.arguments.all[op.arguments.position[name]].kind
            found[name] = self._drawn(name, value, draw, found) if kind is Tensor else literal(value)
        return dict(zip(op.arguments.names, op.arguments.bind((), found), strict=True))

    def _drawn(self, name: str, value: str, draw: Draw, before: Mapping[str, Any]) -> Tensor:
        try:
            sizes = [int(n) for n in value.split("x")]
        except ValueError:
            raise ValueError(f"{self.op}: {name} is a tensor, and takes sizes such as 8192x4096, got {value!r}") from None
        dtypes = self.declaration.dtypes.get(name)
        if dtypes is None or dtypes[0].is_floating_point:
            return draw(*sizes)
        # Integers are indices into the last dimension of what comes before them.
        below = next((t.shape[-1] for t in before.values() if isinstance(t, Tensor)), 2)
        return draw.integers(0, below, *sizes, dtype=dtypes[0])


def literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


@contextlib.contextmanager
def forced(kernels: Any, tunable: Tunable, config: Config | None) -> Generator[None]:
    """Every call takes this configuration meanwhile."""
    tunable.force(config)
    kernels.forget()
    try:
        yield
    finally:
        tunable.force(None)
        kernels.forget()


def on_gpu(run: Callable[[], Any], rounds: int) -> float:
    """Seconds on the GPU, the L2 cache flushed: the median."""
    for _ in range(3):  # The first compiles, the second is recorded, later ones are replayed.
        run()
    spent: list[float] = []
    for _ in range(rounds):
        _measure.flush_cache()
        start = _measure.Tick()
        run()
        spent.append(_measure.Tick() - start)
    return median(spent)


def compile_one(case: Case, backend: str, direction: str, where: Gpu, name: str, config: Config) -> str | None:
    """Compiles a candidate into Triton's cache, in a process of its own; says what is wrong with it, if anything."""
    try:
        op, kernels = case.declaration, offline.function(case.op, backend).kernels
        with forced(kernels, offline.tunables(case.op, backend)[name], config):
            compiled = offline.compile_op(op, backend, where, case.what, case.arguments("meta"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    mine = [c for c in compiled if c.direction == direction]
    if any(c.spilled for c in mine):
        return "it spills registers"
    if any(c.shared > where.shared for c in mine):
        return "it takes more shared memory than there is"
    return None


class Compilers:
    """Processes that compile candidates side by side, before they are timed one by one; or none."""

    def __init__(self, where: Gpu, processes: int) -> None:
        self.where = where
        # They must not inherit a GPU in use.
        self.pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) if processes else None

    def __call__(self, case: Case, backend: str, direction: str, name: str, configs: Sequence[Config]) -> list[str | None]:
        if self.pool is None:
            return [None] * len(configs)
        futures = [self.pool.submit(compile_one, case, backend, direction, self.where, name, dict(c)) for c in configs]
        return [f.result() for f in futures]

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class Search:
    """One kernel in one direction of one case."""

    case: Case
    backend: str
    direction: str
    tunable: Tunable
    asked: tuple[Any, ...]
    right: Oracle
    compilers: Compilers
    stopwatch: Callable[[Callable[[], Any], int], float]
    late: Callable[[], bool]
    tried: int = 0
    wrong: int = 0

    def seconds(self, config: Config, rounds: int = 7) -> float:
        fn = offline.function(self.case.op, self.backend)
        with forced(fn.kernels, self.tunable, config):
            return self.stopwatch(_measure.timed(self.case.declaration, fn, self.right, self.direction), rounds)

    def is_right(self, config: Config) -> bool:
        """Whether results are as right as the tests demand, with every output poisoned before."""
        fn = offline.function(self.case.op, self.backend)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with forced(fn.kernels, self.tunable, config):
                self.right.refuse(fn)
        except AssertionError:
            return False
        finally:
            torch.use_deterministic_algorithms(False)
        return True

    def climb(self, start: Config) -> tuple[Config, float, float]:
        """From a configuration to its fastest right neighbour, and on, until none is faster; its time, and the start's."""
        best, time_of_best = start, self.seconds(start)
        seen = [dict(start)]
        while not self.late():
            self.tunable.asked = self.asked
            steps = [c for c in self.tunable.neighbours(best) if c not in seen]
            found = self.faster(steps, seen, time_of_best)
            # All that helped, at once.
            changes = {n: v for _, config in reversed(found) for n, v in config.items() if best.get(n) != v}
            if len(found) > 1 and {**best, **changes} not in seen:
                found += self.faster([{**best, **changes}], seen, found[0][0])
            for seconds, config in sorted(found, key=lambda pair: pair[0]):
                if self.is_right(config):
                    best, time_of_best = config, seconds
                    break
                self.wrong += 1
            else:
                break
        if best == start:
            return start, time_of_best, time_of_best
        # The fastest of many is partly the luckiest.
        before, after = self.seconds(start, 25), self.seconds(best, 25)
        return (best, after, before) if after < BETTER * before else (start, before, before)

    def faster(self, configs: Sequence[Config], seen: list[Any], than: float) -> list[tuple[float, Config]]:
        """Those of the candidates that compile and are faster, the fastest first."""
        seen += configs
        problems = self.compilers(self.case, self.backend, self.direction, self.tunable.name, configs)
        found: list[tuple[float, Config]] = []
        for config, problem in zip(configs, problems, strict=True):
            if self.late():
                break
            self.tried += 1
            if problem is not None:
                continue
            try:
                seconds = self.seconds(config)
            except Exception:  # It does not compile, or asks for more than the GPU has.
                continue
            if seconds < BETTER * than:
                found.append((seconds, config))
        return sorted(found, key=lambda pair: pair[0])


def stored(path: Path) -> dict[str, dict[str, Config]]:
    return read(path)["kernels"] if path.exists() else {}


def text(data: Mapping[str, Any]) -> str:
    """A file of configurations: a line each, sorted, so that a change shows as such."""
    blocks = [
        f"  {json.dumps(kernel)}: {{\n"
        + ",\n".join(f"   {json.dumps(sizes)}: {json.dumps(configs[sizes], sort_keys=True)}" for sizes in sorted(configs))
        + "\n  }"
        for kernel, configs in sorted(data["kernels"].items())
    ]
    head = f' "arch": {json.dumps(data["arch"])},\n "gpu": {json.dumps(data["gpu"])},\n "kernels": {{\n'
    return "{\n" + head + ",\n".join(blocks) + "\n }\n}\n"


def save(path: Path, where: Gpu, kernel: str, sizes: str, config: Config) -> None:
    """Adds a configuration to a GPU's file, after whoever writes to the folder at this moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        kernels = stored(path)
        kernels.setdefault(kernel, {})[sizes] = dict(config)
        _measure.write(path, text({"arch": where.arch, "gpu": where.name, "kernels": kernels}))
    finally:
        os.close(folder)


def chosen(case: Case, backend: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tunable]]:
    """Runs an op, and says of each direction which kernels choose a configuration; they know by which arguments."""
    known = offline.tunables(case.op, backend).values()
    for tunable in known:
        tunable.asked, tunable.watched = None, True
    try:
        for direction in offline.walk(case.declaration, backend, arguments):
            for tunable in known:
                if tunable.asked is not None:
                    yield direction, tunable
                    tunable.asked = None
    finally:  # Also where the caller has no more time.
        for tunable in known:
            tunable.watched = False


def tune(
    cases: Sequence[Case],
    backends: Sequence[str],
    folders: Mapping[str, Path],
    *,
    budget: float,
    again: bool,
    processes: int,
    console: Console,
    stopwatch: Callable[[Callable[[], Any], int], float] = on_gpu,
) -> int:
    """Tunes each case in each package until time is up; returns how many of them are left."""
    deadline, left = time.monotonic() + budget, 0
    where = gpu(torch.cuda.current_device() if _measure.DEVICE == "cuda" else -1)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress, Compilers(where, processes) as compilers:
        bar = progress.add_task("tuning", total=len(cases) * len(backends))
        for case in cases:
            right = None
            for backend in backends:
                progress.update(bar, description=f"{backend} {case.op} {case.what}")
                path, done = _measure.file_of(folders[backend], where.name), time.monotonic() < deadline
                arguments = case.arguments(_measure.DEVICE) if done else {}
                for direction, tunable in chosen(case, backend, arguments) if done else ():
                    asked = tunable.asked or ()
                    key = bucket(tunable.sizes(*asked))
                    if key in stored(path).get(tunable.name, {}) and not again:
                        continue
                    if time.monotonic() > deadline:
                        done = False
                        break
                    right = right or Oracle(case.declaration, arguments)
                    search = Search(
                        case, backend, direction, tunable, asked, right, compilers, stopwatch,
                        late=lambda: time.monotonic() > deadline,
                    )  # fmt: skip
                    start = tunable.choose(where, *asked)
                    config, after, before = search.climb(start)
                    save(path, where, tunable.name, key, config)
                    tunable.store.forget()
                    wrong = f", {search.wrong} of them wrong" if search.wrong else ""
                    change = "no faster" if config == start else f"{before * 1e6:.1f} -> {after * 1e6:.1f} us, {dict(config)}"
                    console.print(
                        f"{backend} {tunable.name}, {key} ({case.what}): {search.tried} tried{wrong}; {change}",
                        highlight=False, soft_wrap=True,
                    )  # fmt: skip
                left += not done
                progress.advance(bar)
    return left


def choices(case: Case, backends: Sequence[str], where: Gpu) -> Iterator[dict[str, Any]]:
    """Which configurations a call takes on a GPU that need not be here, by kernel."""
    with offline.stand_in(where, compiles=False), FakeTensorMode():
        for backend in backends:
            arguments = offline.on_cuda(case.arguments("meta"))
            for direction, tunable in chosen(case, backend, arguments):
                asked = tunable.asked or ()
                yield {
                    "backend": backend,
                    "direction": direction,
                    "kernel": tunable.name,
                    "sizes": bucket(tunable.sizes(*asked)),
                    "config": dict(tunable.choose(where, *asked)),
                    "tuned": tunable.tuned(where, *asked) is not None,
                }

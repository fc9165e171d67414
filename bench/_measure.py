"""Times, ceilings and where results are kept."""

import functools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kernels_reference._accuracy import Oracle, leaves, outputs
from kernels_reference._op import Op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"
IMPLEMENTATIONS = ("eager", "inductor", "inductor-max-autotune", "helion", "triton")
# Bytes a second, from the vendors' data sheets: only to predict floors on GPUs that are not here.
BANDWIDTH = {"sm_80": 2.0e12, "sm_89": 0.3e12, "sm_90": 4.8e12, "sm_100": 8.0e12, "sm_120": 1.79e12, "gfx942": 5.3e12}


class Tick:
    """A moment on the GPU; the difference of two, in seconds, waits for the later one."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: "Tick") -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


@functools.cache
def _cache() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.int8, device="cuda")


def flush_cache() -> None:
    """Overwrites the L2 cache, and keeps the GPU busy for half a millisecond: the host then enqueues ahead of it."""
    _cache().zero_()
    torch.cuda._sleep(1_000_000)


def directions(op: Op[Any], ahead: bool) -> tuple[str, ...]:
    """What is timed of an op. Where the forward makes gradients ahead, it and the backward only mean something together."""
    return ("forward", "training" if ahead else "backward") if op.grads else ("forward",)


def timed(op: Op[Any], fn: Callable[..., Any], right: Oracle, direction: str) -> Callable[[], Any]:
    """The forward without gradients, the backward of a graph that is kept, or both with a graph that is not."""
    if direction == "forward":
        return torch.no_grad()(functools.partial(fn, **right.arguments))
    fresh = leaves(op, right.arguments)
    wanted = [v for v in fresh.values() if isinstance(v, torch.Tensor) and v.requires_grad]

    def live() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        pairs = [(r, g.to(r.dtype)) for r, g in zip(outputs(fn(**fresh)), right.incoming, strict=True) if r.requires_grad]
        return [r for r, _ in pairs], [g for _, g in pairs]

    def both() -> Any:
        results, incoming = live()
        return torch.autograd.grad(results, wanted, incoming)

    if direction == "training":
        return both
    results, incoming = live()
    return lambda: torch.autograd.grad(results, wanted, incoming, retain_graph=True)


def host_time(fn: Callable[[], Any], calls: int = 100) -> float:
    """Seconds that a warmed call takes the host, whatever the GPU does meanwhile: the median."""
    spent: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        fn()
        spent.append(time.perf_counter() - start)
        if len(spent) % 20 == 0:
            torch.cuda.synchronize()
    return statistics.median(spent)


def graph_time(make: Callable[[], Callable[[], Any]], calls: int = 10, replays: int = 10) -> float | None:
    """Seconds a call in a CUDA graph of several takes, its data in the cache; None where it cannot be captured.

    What is captured is made on the capturing stream, because a backward runs on the stream of its forward.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(stream):
            fn = make()
            fn()
        # Compilers have threads that meanwhile call CUDA.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(calls):
                fn()
    except RuntimeError as error:
        print(f"no graph: {error}")
        torch.cuda.synchronize()
        return None
    graph.replay()
    spent: list[float] = []
    for _ in range(replays):
        flush_cache()
        start = Tick()
        graph.replay()
        spent.append((Tick() - start) / calls)
    return statistics.median(spent)


def peak_memory(fn: Callable[[], Any]) -> int:
    """Bytes allocated at the peak of a call beyond those before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@functools.cache
def ceilings() -> dict[str, float]:
    """What this GPU reaches: copied bytes a second (read and written), bfloat16 matrix operations a second."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def best(fn: Callable[[], Any]) -> float:
        spent: list[float] = []
        for _ in range(12):
            start = Tick()
            fn()
            spent.append(Tick() - start)
        return statistics.median(spent[2:])

    copied = best(lambda: target.copy_(source))
    multiplied = best(lambda: torch.mm(a, b))
    return {"bandwidth": 2 * source.nbytes / copied, "matrix_rate": 2 * 8192**3 / multiplied}


@functools.cache
def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    versions = {name: metadata.version(name) for name in ("torch", "triton", "helion")}
    versions["torch"] = torch.__version__
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda, **versions, **ceilings()}


def file_of(folder: Path, gpu: str) -> Path:
    return folder / f"{gpu.lower().replace(' ', '-')}.json"


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file, one a cell."""
    try:
        rows = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no results file: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(r, dict) and isinstance(r.get("machine"), dict) for r in rows):
        raise ValueError(f"{path} is no results file: a list of cells, each with its machine, was expected")
    return rows


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[n] for n in ("op", "workload", "dtype", "direction", "implementation"))


def stored() -> dict[tuple[Any, ...], dict[str, Any]]:
    """The cells of this GPU's file."""
    path = file_of(RESULTS, torch.cuda.get_device_name())
    return {key(row): row for row in load(path)} if path.exists() else {}


def store(rows: list[dict[str, Any]]) -> Path:
    """Adds cells to this GPU's file, in place of older ones of the same name; a reader never sees half a file."""
    path, kept = file_of(RESULTS, machine()["gpu"]), stored()
    kept |= {key(row): {**row, "date": date.today().isoformat(), "machine": machine()} for row in rows}
    lines = ",\n".join(json.dumps(kept[k], sort_keys=True) for k in sorted(kept))
    write(path, f"[\n{lines}\n]\n")
    return path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)

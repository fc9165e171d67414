"""Each op at its workloads: eager, Inductor, Helion and Triton, side by side."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._inductor import metrics

from kernels_reference._accuracy import Error, Oracle
from kernels_reference._draw import Draw
from kernels_reference._op import Op

from . import _measure, offline
from .conftest import LINES, ROWS, peers


@dataclass
class Candidate:
    """An implementation at a workload: how wrong it is, and how many kernels Inductor made of it."""

    fn: Callable[..., Any]
    errors: dict[str, Error] = field(default_factory=dict[str, Error])
    share: float = 0.0
    """The largest error as a share of what is allowed."""
    kernels: dict[str, int] = field(default_factory=dict[str, int])


@functools.lru_cache(maxsize=1)
def oracle(name: str, workload: str, dtype: torch.dtype) -> Oracle:
    torch.cuda.empty_cache()
    op = offline.load(name)
    return Oracle(op, op.workloads[workload](Draw("cuda", dtype)))


@functools.lru_cache(maxsize=1)
def candidate(name: str, workload: str, dtype: torch.dtype, implementation: str) -> Candidate:
    op, right = offline.load(name), oracle(name, workload, dtype)
    fn = op.eager or op.fn
    if implementation in ("helion", "triton"):
        fn = offline.function(name, f"kernels_{implementation}")
    elif implementation == "liger":
        fn = getattr(peers(), name)
    elif implementation != "eager":
        torch._dynamo.reset()
        mode = "max-autotune-no-cudagraphs" if implementation == "inductor-max-autotune" else None
        fn = torch.compile(fn, fullgraph=True, dynamic=False, mode=mode)
    found = Candidate(fn)
    metrics.reset()
    with torch.no_grad():
        fn(**right.arguments)
    found.kernels["forward"] = metrics.generated_kernel_count
    found.errors = right.errors(fn)
    # The graph for training is compiled apart: its forward, and then the backward.
    found.kernels["backward"] = metrics.generated_kernel_count - 2 * found.kernels["forward"]
    found.share = right.share(found.errors)
    return found


@pytest.mark.gpu
@pytest.mark.benchmark(timer=_measure.Tick)
@pytest.mark.filterwarnings("ignore")  # Inductor's, such as that it splits a softmax.
def test_times(
    benchmark: Any, pytestconfig: pytest.Config, op: Op[Any], workload: str, implementation: str, direction: str
) -> None:
    torch._functorch.config.donated_buffer = False  # pyright: ignore  # A graph that is kept is differentiated again.
    name = str(pytestconfig.getoption("--dtype"))
    dtype = getattr(torch, name)
    right = oracle(op.name, workload, dtype)
    if implementation == "liger" and direction == "backward" and op.name in peers().FORWARD_ONLY:
        pytest.skip(f"{implementation}: {peers().FORWARD_ONLY[op.name]}")
    try:
        made = candidate(op.name, workload, dtype, implementation)
    except Exception as error:
        if implementation != "liger":
            raise
        pytest.skip(f"{implementation}: {type(error).__name__}: {error}")
    # What a baseline gets wrong is not ours to mend, and is in its cell; far from right, its time would mean nothing.
    if not made.share <= (1 if implementation in ("helion", "triton") else 10):
        pytest.fail(
            f"{implementation} has {made.share:.2f} of the error that is allowed at {workload}, so no time: {made.errors}"
        )
    run = _measure.timed(op, made.fn, right, direction)
    for _ in range(3):
        run()
    start = _measure.Tick()
    run()
    rounds = max(10, min(100, int(0.03 / (_measure.Tick() - start))))
    benchmark.group = f"{op.name} {workload} {name} {direction}"
    benchmark.pedantic(run, setup=_measure.flush_cache, rounds=rounds, warmup_rounds=2)
    seconds = benchmark.stats.stats.median
    ceilings, costs = _measure.ceilings(), op.cost(**right.arguments)
    chosen = {"forward": costs[:1], "backward": costs[1:]}.get(direction, costs)
    moved, flops = sum(c.bytes for c in chosen), sum(c.flops for c in chosen)
    floor = max(moved / ceilings["bandwidth"], flops / ceilings["matrix_rate"])
    graph = _measure.graph_time(lambda: _measure.timed(op, made.fn, right, direction)) if seconds < 1e-4 else None
    row: dict[str, Any] = {
        "op": op.name,
        "workload": workload,
        "dtype": name,
        "direction": direction,
        "implementation": implementation,
        "device_us": round(seconds * 1e6, 2),
        "spread_us": round(benchmark.stats.stats.iqr * 1e6, 2),
        "host_us": round(_measure.host_time(run, max(10, min(100, int(0.3 / seconds)))) * 1e6, 2),
        "graph_us": graph and round(graph * 1e6, 2),
        "gb_per_s": round(moved / seconds / 1e9, 1),
        "tflop_per_s": round(flops / seconds / 1e12, 3),
        "percent_of_ceiling": round(100 * floor / seconds, 1),
        "peak_bytes": _measure.peak_memory(run),
        "error": max(e.norm for n, e in made.errors.items() if n.startswith("gradient") == (direction != "forward")),
        "error_share": round(made.share, 3),
        "kernels": made.kernels.get(direction, sum(made.kernels.values())) if implementation.startswith("inductor") else None,
    }
    same = ("op", "workload", "dtype", "direction")
    earlier = [*_measure.stored().values(), *ROWS]
    others = {r["implementation"]: r["device_us"] for r in earlier if all(r[n] == row[n] for n in same)}
    row |= {f"speedup_over_{n}": round(others[n] / row["device_us"], 3) for n in ("eager", "inductor") if n in others}
    benchmark.extra_info |= {n: v for n, v in row.items() if v is not None}
    ROWS.append(row)


def test_without_a_gpu(op: Op[Any]) -> None:
    """What needs no GPU: errors under the interpreter, and the kernels compiled for GPUs that are elsewhere."""
    LINES.append(f"{op.name}: largest error as a share of what is allowed, over all samples in float16")
    for backend in ("helion", "triton"):
        fn = offline.function(op.name, f"kernels_{backend}")
        share = 0.0
        for arguments in op.samples(Draw("cpu", torch.float16)):
            right = Oracle(op, arguments)
            share = max(share, right.share(right.errors(fn)))
        LINES.append(f"  {backend:8}{share:.2f}")
        assert share <= 1
    widest = max(op.workloads, key=lambda w: op.cost(**op.workloads[w](Draw("meta", torch.bfloat16)))[0].bytes)
    costs = op.cost(**op.workloads[widest](Draw("meta", torch.bfloat16)))
    LINES.append(f"{op.name}: kernels of all workloads in bfloat16, compiled; predicted floor of {widest}")
    LINES.append("  GPU                      backend  kernels  registers  spilled  shared memory  floor forward  backward")
    generated: list[str] = []
    lines = [line for archs in (offline.NVIDIA, "gfx942") for line in offline.in_child(archs, op.name)]
    for arch, gpu in offline.GPUS.items():
        compiled = [line for line in lines if line["arch"] == arch]
        floors = [1e6 * cost.bytes / _measure.BANDWIDTH[arch] for cost in costs]
        for backend in ("helion", "triton"):
            mine = [c for c in compiled if c["backend"] == f"kernels_{backend}"]
            most = [max(c[n] for c in mine) for n in ("registers", "spilled", "shared")]
            LINES.append(
                f"  {gpu.name:24} {backend:8}{len({c['kernel'] for c in mine}):8}{most[0]:11}{most[1]:9}{most[2]:13} B"
                f"{floors[0]:12.0f} us{floors[1]:7.0f} us"
            )
        if arch == "sm_90":
            sources = sorted({(c["kernel"], c["source"]) for c in compiled if c["backend"] == "kernels_helion"})
            generated = [f"  {kernel} in {source}" for kernel, source in sources]
    LINES.extend([f"{op.name}: the Triton that Helion generates for {offline.GPUS['sm_90'].name}", *generated])

"""What only a GPU shows, for every op."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import _measure
from kernels_reference import _replay
from kernels_reference._draw import Draw
from kernels_reference._op import Op

from . import _ops

pytestmark = pytest.mark.gpu


def forward_and_backward(op: Op[Any], backend: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    results = _ops.outputs(_ops.function(op, backend)(**arguments))
    live = [r for r in results if r.requires_grad]
    wanted = [arguments[n] for n in op.grads if isinstance(arguments.get(n), Tensor)]
    incoming = [torch.linspace(-1, 1, r.numel(), device=r.device).view(r.shape).to(r.dtype) for r in live]
    return (*results, *torch.autograd.grad(live, wanted, incoming))


def test_workloads(op: Op[Any], backend: str) -> None:
    """Real models' shapes of moderate size; `pytest bench` checks all of them."""
    for workload, make in op.workloads.items():
        if sum(t.numel() for t in make(Draw("meta", torch.bfloat16)).values() if isinstance(t, Tensor)) < 2**26:
            try:
                _ops.check(op, backend, make(Draw("cuda", torch.bfloat16)))
            except AssertionError as error:
                raise AssertionError(f"{workload}: {error}") from error
            torch.cuda.empty_cache()


@pytest.mark.parametrize("calls", [1, 3])
def test_cuda_graph(op: Op[Any], backend: str, calls: int) -> None:
    """After one call, a capture replays with changed data; incoming gradients are captured too. So after more."""
    _ops.function(op, backend).kernels.forget()  # type: ignore[attr-defined]
    arguments = _ops.leaves(op, _ops.sample(op, 1, torch.bfloat16))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(calls):
            forward_and_backward(op, backend, arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = forward_and_backward(op, backend, arguments)
    changed = _ops.sample(op, 1, torch.bfloat16, seed=7)
    with torch.no_grad():
        for name, value in changed.items():
            if isinstance(value, Tensor):
                arguments[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, forward_and_backward(op, backend, _ops.leaves(op, changed)), rtol=0, atol=0)


def test_cold_capture_works_or_says_what_to_do(op: Op[Any], backend: str) -> None:
    """float16 at a size that no other test has: nothing is compiled for it yet."""
    arguments = {
        n: torch.cat([v] * 3, 0) if isinstance(v, Tensor) and n in op.rows else v
        for n, v in _ops.sample(op, 1, torch.float16).items()
    }
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = _ops.outputs(_ops.function(op, backend)(**arguments))
    except RuntimeError as error:
        assert f"{op.name}: the first call of a kernel" in str(error)  # noqa: PT017
        torch.cuda.synchronize()
        return
    graph.replay()
    torch.testing.assert_close(captured, _ops.outputs(_ops.function(op, backend)(**arguments)), rtol=0, atol=0)


def test_side_stream(op: Op[Any], backend: str) -> None:
    """Kernels go to the current stream, after what is already in it; those of replayed calls, too."""
    arguments = _ops.sample(op, 1, torch.float32)
    expected = [_ops.outputs(_ops.function(op, backend)(**arguments)) for _ in range(3)][-1]
    stream = torch.cuda.Stream()
    name = next(iter(op.grads))
    later = torch.full_like(arguments[name], torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        later.copy_(arguments[name])
        got = _ops.outputs(_ops.function(op, backend)(**{**arguments, name: later}))
    stream.synchronize()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device(op: Op[Any], backend: str) -> None:
    arguments = {n: v.to("cuda:1") if isinstance(v, Tensor) else v for n, v in _ops.sample(op, 1, torch.float32).items()}
    torch.cuda.set_device(0)
    _ops.check(op, backend, arguments)
    assert torch.cuda.current_device() == 0


def test_past_two_to_the_31(op: Op[Any], backend: str) -> None:
    """The last rows of more than 2**31 elements equal those rows alone; a view whose strides span more, likewise."""
    if not op.rows:
        pytest.skip("the op's own test has this")
    arguments = _ops.sample(op, 1, torch.bfloat16)
    lead = next(iter(op.rows))
    width = arguments[lead].shape[-1]
    rows = 2**31 // width + 9
    draw = Draw("cuda", torch.bfloat16)
    for spread in (False, True):
        torch.cuda.empty_cache()
        big, last = dict(arguments), dict(arguments)
        for name, kept in op.rows.items():
            value = arguments.get(name)
            if not isinstance(value, Tensor):
                continue
            flat = value.reshape(-1, *value.shape[value.ndim - kept :])
            if spread and kept:
                pool = torch.empty(9, 2**28, dtype=value.dtype, device="cuda")
                pool[:, : flat.shape[-1]] = draw(9, flat.shape[-1])
                big[name] = pool[:, : flat.shape[-1]]
            elif kept:
                big[name] = draw(rows, *flat.shape[1:])
            else:
                big[name] = flat[:1].expand(9 if spread else rows).contiguous()
            last[name] = big[name][-8:].clone()
        big, last = _ops.leaves(op, big), _ops.leaves(op, last)
        got, expected = _ops.outputs(_ops.function(op, backend)(**big)), _ops.outputs(_ops.function(op, backend)(**last))
        for g, e in zip(got, expected, strict=True):
            if g.ndim:
                torch.testing.assert_close(g[-8:], e, rtol=0, atol=0)
        names = [n for n in op.grads if n in op.rows and isinstance(arguments.get(n), Tensor)]
        if all(g.ndim for g in got):
            big_grads = torch.autograd.grad(got, [big[n] for n in names], [torch.ones_like(g) for g in got])
            last_grads = torch.autograd.grad(expected, [last[n] for n in names], [torch.ones_like(e) for e in expected])
            for g, e in zip(big_grads, last_grads, strict=True):
                torch.testing.assert_close(g[-8:], e, rtol=0, atol=0)
        del big, got


def test_first_call_launches_no_tuner(op: Op[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELION_DISALLOW_AUTOTUNING", "1")
    arguments = {
        n: torch.cat([v] * 5, 0) if isinstance(v, Tensor) and n in op.rows else v
        for n, v in _ops.sample(op, 1, torch.float32).items()
    }
    _ops.function(op, "kernels_helion")(**arguments)


FIRST_CALLS = """
import importlib, json, sys, time, torch
from kernels_reference._draw import Draw
import kernels_reference
package = importlib.import_module(sys.argv[1])
torch.zeros(1, device="cuda")
spent = {}
for name in kernels_reference.__all__:
    op = importlib.import_module(f"kernels_reference.{name}").op
    arguments = list(op.samples(Draw("cuda", torch.bfloat16)))[1]
    start = time.perf_counter()
    getattr(package, name)(**arguments)
    torch.cuda.synchronize()
    spent[name] = time.perf_counter() - start
print(json.dumps(spent))
"""


def test_first_calls_take_seconds(backend: str, tmp_path: Path) -> None:
    """In a fresh process with empty caches, each within 3 seconds; and they say nothing."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "t"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i")}
    command = [sys.executable, "-c", FIRST_CALLS, backend]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    spent = json.loads(done.stdout)
    print(backend, {name: round(seconds, 2) for name, seconds in spent.items()})
    assert max(spent.values()) < 3


def test_call_costs_little_more_than_a_launch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed, without gradients: what Triton takes to launch the same kernel, with its allocation, and 5 microseconds."""
    torch.use_deterministic_algorithms(False)  # It would fill, with a launch, each tensor that is allocated in Python.
    x, fn, launches = (
        torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16),
        _ops.function(_ops.load("softmax"), backend),
        [],
    )
    launch = _replay.launch

    def seen(*arguments: Any, **options: Any) -> Any:
        launches.append((arguments, options))
        return launch(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_replay, "launch", seen)
        fn.kernels.forget()  # type: ignore[attr-defined]
        fn(x)
    ((start, *arguments), options), *others = launches
    assert not others
    for _ in range(3):
        fn(x)
    raw = min(_measure.host_time(lambda: (torch.empty_like(x), start(*arguments, **options)), 500) for _ in range(5))
    ours = min(_measure.host_time(lambda: fn(x), 500) for _ in range(5))
    print(f"{backend}: launch {raw * 1e6:.1f} us, call {ours * 1e6:.1f} us")
    assert ours < raw + 5e-6


class Bare(torch.autograd.Function):
    """What a differentiable function in Python costs that does nothing but allocate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.empty_like(y)


def test_training_call_costs_little_more_than_the_native_one(backend: str) -> None:
    """Forward and backward: at most 1.5 times what PyTorch's own takes."""
    torch.use_deterministic_algorithms(False)  # It would fill, with a launch, each tensor that is allocated in Python.
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad, fn = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16), _ops.function(_ops.load("softmax"), backend)
    spent: dict[str, list[float]] = {"native": [], "bare": [], "ours": []}
    for _ in range(5):
        for name, call in (("native", lambda x: x.softmax(-1)), ("bare", Bare.apply), ("ours", fn)):
            spent[name].append(_measure.host_time(lambda call=call: torch.autograd.grad(call(x), x, grad), 500))
    least = {name: min(times) for name, times in spent.items()}
    print(backend, {name: f"{seconds * 1e6:.1f} us" for name, seconds in least.items()})
    assert least["ours"] < 1.5 * least["native"]


def test_tuner_command(tmp_path: Path) -> None:
    options = ["--shape", "64x1000", "--budget", "120", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "bench", "tune", "softmax", *options]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    for name in _ops.BACKENDS:
        (path,) = (tmp_path / name).glob("*.json")
        kernels = json.loads(path.read_text())["kernels"]
        assert all(list(configs) == ["M=64 N=1024 itemsize=2"] for configs in kernels.values())
        assert len(kernels) == 2

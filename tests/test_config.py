"""Configurations: which one a call takes, what a tuner writes, and what it refuses."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import __main__, _measure, _tune, offline
from kernels_reference._config import Gpu, Tunable, gpu, read

from . import _ops

ROOT = Path(__file__).parent.parent
HERE = gpu(0 if torch.cuda.is_available() else -1)
H200, SIBLING = offline.GPUS["sm_90"], Gpu("NVIDIA H100 PCIe", "sm_90", 114, 227 << 10, 32)
SIZES = "M=8 N=512 itemsize=4"
TUNED = {
    "kernels_helion": ("softmax_whole", {"block_sizes": [4], "reduction_loops": [None], "num_warps": 2}),
    "kernels_triton": ("softmax_fwd", {"BLOCK_M": 4, "BLOCK_N": 512, "num_stages": 1, "num_warps": 2, "PROGRAMS": 1}),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's own configurations."""
    monkeypatch.setenv("HELION_KERNELS_CONFIGS", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for backend in _ops.BACKENDS:
        for name in _ops.NAMES:
            _ops.function(_ops.load(name), backend).kernels.forget()  # type: ignore[attr-defined]
            for tunable in offline.tunables(name, backend).values():
                tunable.store.forget()
                tunable.forget()


def softmax(backend: str) -> tuple[Callable[..., torch.Tensor], Tunable]:
    tunable = offline.tunables("softmax", backend)[TUNED[backend][0]]
    tunable.watched = True
    return _ops.function(_ops.load("softmax"), backend), tunable


def x() -> torch.Tensor:
    return torch.randn(7, 300, device=_ops.DEVICE)


def write(folder: Path, backend: str, where: Gpu, config: Any) -> None:
    _tune.save(_measure.file_of(folder / backend, where.name), where, TUNED[backend][0], SIZES, config)


def test_a_call_takes_what_is_tuned(backend: str, folder: Path) -> None:
    fn, tunable = softmax(backend)
    write(folder, backend, HERE, TUNED[backend][1])
    torch.testing.assert_close(fn(t := x()), t.softmax(-1))
    assert tunable.choose(HERE, *(tunable.asked or ())) == TUNED[backend][1]


def test_sibling_user_and_stranger(backend: str, folder: Path) -> None:
    """This very GPU before another of its architecture; for other architectures the rule."""
    fn, tunable = softmax(backend)
    fn(x())
    asked = tunable.asked or ()
    rule = tunable.default(HERE, *asked)
    other = {**TUNED[backend][1], "num_warps": 8}
    write(folder, backend, SIBLING, other)
    tunable.store.forget()
    assert tunable.choose(H200, *asked) == other
    write(folder, backend, H200, TUNED[backend][1])
    tunable.store.forget()
    assert tunable.choose(H200, *asked) == TUNED[backend][1]
    assert tunable.choose(SIBLING, *asked) == other
    stranger = Gpu("NVIDIA of tomorrow", "sm_999", 64, 99 << 10, 32)
    assert tunable.tuned(stranger, *asked) is None
    assert tunable.choose(stranger, *asked) == rule


def test_configurations_of_another_version(backend: str, folder: Path) -> None:
    """Where a kernel no longer knows a name, or knows another, its rule decides."""
    fn, _ = softmax(backend)
    write(folder, backend, HERE, {**TUNED[backend][1], "BLOCK_K": 64})
    torch.testing.assert_close(fn(t := x()), t.softmax(-1))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"gpu": 1, "arch": "a", "kernels": {}}', '{"gpu": "a", "arch": "a", "kernels": {"k": {"s": {"n": {}}}}}'],
)
def test_no_file_of_configurations(text: str, tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(text)
    with pytest.raises(ValueError, match=r"gpu\.json is no file of configurations"):
        read(tmp_path / "gpu.json")


def test_shipped_configurations(backend: str) -> None:
    """Every file names kernels that there are, and is as the tuner would write it."""
    found = {t.name: t for op in _ops.NAMES for t in offline.tunables(op, backend).values()}
    for op in _ops.NAMES:
        assert all(found[name] is t for name, t in offline.tunables(op, backend).items()), "two kernels of one name"
    for path in (ROOT / backend / "configs").glob("*.json"):
        assert set(read(path)["kernels"]) <= set(found)
        assert path.read_text() == _tune.text(read(path)), path


PROCESS = """
import os, torch, kernels_helion, kernels_triton
children = []
for _ in range({forks}):  # Each child forks, too.
    children = [*children, child] if (child := os.fork()) else []
x = torch.randn(5, 300, device={device!r})
for package in (kernels_helion, kernels_triton):
    torch.testing.assert_close(package.softmax(x), x.softmax(-1))
assert not any(os.waitpid(child, 0)[1] for child in children)
"""


def test_eight_processes_at_once(tmp_path: Path) -> None:
    """First calls with an empty cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    # Forks save imports, which take longer than the calls; a GPU can be used on one side of a fork only.
    forks = 3 if _ops.DEVICE == "cpu" else 0
    start = [sys.executable, "-c", PROCESS.format(device=_ops.DEVICE, forks=forks)]
    many = range(8 >> forks)
    for process in [subprocess.Popen(start, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for _ in many]:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def test_eight_writers_at_once(tmp_path: Path) -> None:
    """No configuration is lost."""
    path = tmp_path / "configs" / "here.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: _tune.save(path, HERE, "kernel", f"M={i}", {"num_warps": 4}), range(64)))
    assert read(path)["kernels"] == {"kernel": {f"M={i}": {"num_warps": 4} for i in range(64)}}
    assert path.read_text() == _tune.text(read(path))


class Watch:
    """A stopwatch that likes many warps, and dislikes what it is told to; it runs what it times, as a real one does."""

    def __init__(self, tunable: Callable[[], Tunable]) -> None:
        self.tunable = tunable
        self.seen: list[Any] = []

    def __call__(self, run: Callable[[], Any], rounds: int) -> float:
        run()
        config = dict(self.tunable().forced or {})
        self.seen.append(config)
        return 1e-3 / config["num_warps"]


def run_tuner(
    backend: str, folder: Path, *, budget: float = 600, again: bool = False, shape: str = "8x300"
) -> tuple[int, Watch]:
    _, tunable = softmax(backend)
    watch = Watch(lambda: next(t for t in offline.tunables("softmax", backend).values() if t.forced is not None) or tunable)
    left = _tune.tune(
        [_tune.Case("softmax", shape, "float32")],
        [backend],
        {backend: folder / backend},
        budget=budget,
        again=again,
        processes=0,
        console=Console(stderr=True),
        stopwatch=watch,
    )
    return left, watch


def test_tuner(backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It climbs to the fastest, writes it, does not tune it again, and a call takes it."""
    kind = type(softmax(backend)[1])
    neighbours = kind.neighbours
    few = {"block_sizes", "BLOCK_M", "num_warps"}
    monkeypatch.setattr(
        kind,
        "neighbours",
        lambda self, config: (c for c in neighbours(self, config) if any(c.get(n) != config.get(n) for n in few)),
    )
    left, watch = run_tuner(backend, folder)
    assert left == 0
    path = _measure.file_of(folder / backend, HERE.name)
    kernels = read(path)["kernels"]
    assert len(kernels) == 2  # The forward and the backward.
    name = TUNED[backend][0]
    config = kernels[name][SIZES]
    assert config["num_warps"] == max(c["num_warps"] for c in watch.seen) > 2
    assert f"{backend} {name}, {SIZES}" in capsys.readouterr().err
    before = path.read_text()
    left, watch = run_tuner(backend, folder)
    assert (left, watch.seen, path.read_text()) == (0, [], before)
    fn, tunable = softmax(backend)
    forget()
    torch.testing.assert_close(fn(t := x()), t.softmax(-1))
    assert tunable.choose(HERE, *(tunable.asked or ())) == config


def test_keeps_no_tensors(backend: str) -> None:
    """A call's tensors are freed with it, though its kernel was compiled for them."""
    fn, tunable = softmax(backend)
    tunable.watched = False
    forget()
    fn(t := x())  # It compiles; a later call would be kept by nobody anyway.
    gc.collect()
    address = t.untyped_storage().data_ptr()
    others = (o for o in gc.get_objects() if type(o) is torch.Tensor and o is not t)
    assert not [o for o in others if o.numel() and o.untyped_storage().data_ptr() == address]


def test_tuner_without_time(backend: str, folder: Path) -> None:
    assert run_tuner(backend, folder, budget=0)[0] == 1
    assert not list(folder.rglob("*.json"))


def test_tuner_keeps_what_is_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast, a configuration whose results are wrong is not taken."""
    backend, right = "kernels_triton", _tune.Search.is_right
    monkeypatch.setattr(_tune.Search, "is_right", lambda self, config: config["num_warps"] < 8 and right(self, config))
    run_tuner(backend, folder)
    for configs in read(_measure.file_of(folder / backend, HERE.name))["kernels"].values():
        assert all(c["num_warps"] < 8 for c in configs.values())


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    done = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(done, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_config_command() -> None:
    done = command("config", "softmax", "--arch", "sm_80", "--shape", "64x128256")
    assert done.returncode == 0, done.stderr
    assert "softmax, 64x128256, bfloat16, on NVIDIA A100-SXM4-80GB (sm_80)" in done.stdout
    for name in ("kernels_helion forward: softmax_long, M=64 N=131072", "kernels_triton backward: softmax_bwd, M=64 N=131072"):
        assert name in done.stdout


NO_GPU = (
    ("tune softmax --budget 60", "tuning needs a GPU"),
    ("config softmax", "there is no GPU here: name one by --arch"),
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("config softmax --arch sm_90 --shape x=8x", "x is a tensor, and takes sizes such as 8192x4096, got '8x'"),
        ("config softmax --arch sm_90 --shape y=8", "softmax has no argument 'y'; it has x, dim"),
        ("config soft --arch sm_90", "there is no op 'soft'; there are add_layer_norm"),
        ("tune --shape 8x8", "--shape needs an op"),
        *(NO_GPU if _measure.DEVICE == "cpu" else ()),
    ],
)
def test_bad_commands(words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words.split()])
    assert __main__.main() == 1
    errors = capsys.readouterr().err
    assert errors.startswith("python -m bench: ")
    assert message in errors

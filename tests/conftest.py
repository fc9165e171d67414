"""Runs every op on this machine: on the GPU, or under Triton's interpreter where there is none."""

import os
from collections.abc import Iterator

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Read when kernels are decorated, so before they are imported.

import pytest

from tests import _offline, _ops

GPU_TESTS: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU; left out, and counted in the summary, without one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Compilation for other GPUs goes on beside the other tests; whoever waits for it comes last.
    items.sort(key=lambda item: "architecture" in getattr(item, "fixturenames", ()))
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    GPU_TESTS.extend(item.nodeid for item in left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if GPU_TESTS:
        names = sorted({name.partition("::")[2].partition("[")[0] for name in GPU_TESTS})
        terminalreporter.line(
            f"No GPU here: kernels ran under Triton's interpreter; {len(GPU_TESTS)} tests need a GPU: {', '.join(names)}"
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    functions = [item for item in session.items if isinstance(item, pytest.Function) and "architecture" in item.fixturenames]
    if functions and not session.config.option.collectonly:
        _offline.start([str(item.callspec.params["architecture"]) for item in functions])


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN, as PyTorch's deterministic mode does, so that an element which no kernel writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> torch.device:
    return torch.device(_ops.DEVICE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`op` and `backend` run a test for each op in each kernel package; `sample` adds each of the op's samples."""
    if "sample" in metafunc.fixturenames:
        pairs = [(name, i) for name in _ops.NAMES for i in range(_ops.sample_count(name))]
        metafunc.parametrize(("op", "sample"), [(_ops.load(n), i) for n, i in pairs], ids=[f"{n}-{i}" for n, i in pairs])
    elif "op" in metafunc.fixturenames:
        metafunc.parametrize("op", [_ops.load(name) for name in _ops.NAMES], ids=_ops.NAMES)
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", _ops.BACKENDS)

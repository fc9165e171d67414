"""Runs every op on this machine: on the GPU, or under Triton's interpreter where there is none."""

import os
from collections.abc import Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Read when kernels are decorated, so before they are imported.

import pytest

from tests import _ops

GPU_TESTS: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The interpreter keeps every core busy; a GPU has memory for one process of tests."""
    if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput") and not torch.cuda.is_available():
        config.option.numprocesses = os.cpu_count() if config.option.numprocesses is None else config.option.numprocesses
        config.option.dist, config.option.loadscopereorder = "loadgroup", False


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU; left out, and counted in the summary, without one")
    config.addinivalue_line("markers", "xdist_group(name): runs in one process with the others of this name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest first, so that no core waits for it at the end; what compiles the same Helion kernels in one process.
    items.sort(key=lambda item: ("architectures" not in getattr(item, "fixturenames", ()), "kernels_helion" not in item.name))
    for item in items:
        parameters = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
        if parameters and "backend" in parameters:
            op = parameters["op"].name if "op" in parameters else item.path.stem.removeprefix("test_")
            item.add_marker(pytest.mark.xdist_group(f"{op} {parameters['backend']}"))
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    GPU_TESTS.update(item.nodeid for item in left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if output := getattr(session.config, "workeroutput", None):
        output["gpu"] = sorted(GPU_TESTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    GPU_TESTS.update(getattr(node, "workeroutput", {}).get("gpu", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if GPU_TESTS:
        names = sorted({name.partition("::")[2].partition("[")[0] for name in GPU_TESTS})
        terminalreporter.line(
            f"No GPU here: kernels ran under Triton's interpreter; {len(GPU_TESTS)} tests need a GPU: {', '.join(names)}"
        )


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
    """`op` and `backend` run a test for each op in each kernel package; `sample` for each sample, `dtype` in each dtype."""
    names = metafunc.fixturenames
    if {"sample", "dtype"} <= set(names):
        # The interpreter is slow: under it samples take the dtypes in turns, the second float32 as in other tests of it.
        cells = [
            pytest.param(_ops.load(n), i, dtype, id=f"{n}-{i}-{str(dtype).removeprefix('torch.')}")
            for n in _ops.NAMES
            for i in range(_ops.sample_count(n))
            for dtype in (_ops.DTYPES if torch.cuda.is_available() else (_ops.DTYPES[(i + 2) % 3],))
        ]
        metafunc.parametrize(("op", "sample", "dtype"), cells)
    elif "sample" in names:
        cells = [pytest.param(_ops.load(n), i, id=f"{n}-{i}") for n in _ops.NAMES for i in range(_ops.sample_count(n))]
        metafunc.parametrize(("op", "sample"), cells)
    elif "op" in names:
        metafunc.parametrize("op", [_ops.load(name) for name in _ops.NAMES], ids=_ops.NAMES)
    if "backend" in names:
        metafunc.parametrize("backend", _ops.BACKENDS)

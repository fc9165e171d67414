"""`pytest bench`: parameters, the order of cells, and where their results go."""

import importlib
import importlib.util
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Read when kernels are decorated, so before they are imported.

import pytest

import kernels_reference

from . import _measure
from .offline import function, load

ROWS: list[dict[str, Any]] = []
LINES: list[str] = []


def peers() -> Any:
    """The functions of peers, if the extra of that name is installed."""
    if importlib.util.find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    return importlib.import_module("bench._peers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="dtype of the workloads")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A cell for each op, workload, direction and implementation; those of a workload follow one another."""
    ops = {name: load(name) for name in kernels_reference.__all__}
    if "workload" in metafunc.fixturenames:
        cells = [
            pytest.param(op, w, i, d, id=f"{name}-{w}-{i}-{d}")
            for name, op in ops.items()
            for w in op.workloads
            for i in (*_measure.IMPLEMENTATIONS, *(["liger"] if hasattr(peers(), name) else []))
            for d in _measure.directions(op, function(name, "kernels_triton").kernels.ahead)
        ]
        metafunc.parametrize(("op", "workload", "implementation", "direction"), cells)
    elif "op" in metafunc.fixturenames:
        metafunc.parametrize("op", list(ops.values()), ids=list(ops))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = torch.cuda.is_available()
    left_out = [item for item in items if (item.get_closest_marker("gpu") is not None) != gpu]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: measures times")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in LINES:
        terminalreporter.line(line)
    if not torch.cuda.is_available():
        terminalreporter.line("No GPU here: no times were measured. `pytest bench` on a machine with a GPU measures them.")


def pytest_sessionfinish() -> None:
    if ROWS:
        LINES.append(f"Results are in {_measure.store(ROWS)}")

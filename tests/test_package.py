"""The house: who imports whom, what is exported, what a stranger gets who lacks something."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import _ops

ROOT = Path(__file__).parent.parent
PACKAGES = ("kernels_reference", *_ops.BACKENDS)


def imports(path: Path) -> set[str]:
    """The top-level packages that a file imports when it is imported."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").partition(".")[0])
    return found


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def test_imports_point_one_way() -> None:
    for package in PACKAGES:
        foreign = set(PACKAGES) - {package, "kernels_reference"}
        for path in (ROOT / package).glob("*.py"):
            assert not imports(path) & foreign, path
            if package == "kernels_reference" and not path.name.startswith("_"):
                assert not imports(path) & {"triton", "helion"}, path
    done = python(
        "import sys, kernels_reference; sys.exit(bool({'triton', 'helion'} & set(sys.modules)) and 'torch' not in sys.modules)"
    )
    assert done.returncode == 0, done.stderr


def test_packages_export_the_same() -> None:
    modules = [importlib.import_module(name) for name in PACKAGES]
    assert all(module.__all__ == sorted(_ops.NAMES) for module in modules)
    for name in _ops.NAMES:
        signatures = {str(inspect.signature(getattr(module, name))) for module in modules}
        assert len(signatures) == 1, name


@pytest.mark.parametrize(("folder", "most"), [("kernels_reference", 180), ("kernels_helion", 190), ("kernels_triton", 235)])
def test_files_keep_their_budget(folder: str, most: int) -> None:
    long = {p.name: n for p in (ROOT / folder).glob("[a-z]*.py") if (n := len(p.read_text().splitlines())) > most}
    assert not long


def test_declarations_are_complete() -> None:
    for name in _ops.NAMES:
        op = _ops.load(name)
        assert op.name == name
        assert len(op.workloads) >= 3
        assert all("/" in w or w.split("-")[0] in ("square", "wide", "odd") for w in op.workloads), list(op.workloads)


def test_unusable_helion_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "helion.py").write_text("raise ImportError('cannot import name IntelGPUError')")
    done = python("import kernels_helion", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: kernels_helion cannot use helion ")
    assert "helion 1.5.1 with torch 2.13 or newer, helion 1.5.0 with torch 2.11" in last


def test_import_says_nothing() -> None:
    done = python("import kernels_helion, kernels_triton")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FIRST_CALLS = """
import torch
from tests import _ops
for name in _ops.NAMES:
    op = _ops.load(name)
    for backend in _ops.BACKENDS:
        results = _ops.outputs(_ops.function(op, backend)(**_ops.leaves(op, _ops.sample(op, 1, torch.float32))))
        sum(r.sum() for r in results).backward()
"""


def test_first_calls_say_nothing() -> None:
    done = python(FIRST_CALLS, TRITON_INTERPRET="0" if torch.cuda.is_available() else "1", PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_gpu_or_interpreter_one_error_says_what_to_do() -> None:
    code = "import torch, {0}; {0}.softmax(torch.ones(2, 3))"
    for package in _ops.BACKENDS:
        last = python(code.format(package)).stderr.strip().splitlines()[-1]
        assert last.startswith("ValueError: softmax: x must be on a GPU, got cpu. To run without one, set TRITON_INTERPRET=1")

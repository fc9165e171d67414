"""The example trains alike with every ops module, compiles as one graph, and its command keeps its word."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.llama import Config, Llama, load_ops

from ._ops import DEVICE

ROOT = Path(__file__).parent.parent
CONFIG = Config(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, length=16)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
OPS = ("reference", "helion", "triton")


@pytest.fixture(autouse=True)
def not_deterministic_on_a_gpu(poisoned: None) -> None:
    """There, cuBLAS and attention warn in deterministic mode. Listed after it, this turns it off."""
    if DEVICE == "cuda":
        torch.use_deterministic_algorithms(False)


@functools.cache
def first_steps(
    ops: str, dtype: torch.dtype, *, exact: bool = False, compiled: bool = False
) -> tuple[list[float], Mapping[str, Tensor]]:
    """The losses of three steps, compiled of one, and the first gradients; `exact`: of the same weights in float64."""
    torch.manual_seed(0)
    model = Llama(replace(CONFIG, dtype=dtype), load_ops(ops)).to(DEVICE)
    model = model.double() if exact else model
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for _ in range(1 if compiled else 3):
        tokens = torch.randint(CONFIG.vocab, (2, CONFIG.length + 1)).to(DEVICE)
        loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def assert_agrees(ops: str, dtype: torch.dtype, **how: bool) -> None:
    """At most twice eager PyTorch's error against float64, or twice the roundings that `_ops.assert_close` allows one op.

    Twice and not 1.5 times, as for one op: the rounding errors of a whole model are more random. Seen: 1.3 times.
    """
    roundings = (16 if dtype == torch.float32 else 4) * torch.finfo(dtype).eps / 2
    losses, gradients = first_steps(ops, dtype, **how)
    eager_losses, eager_gradients = first_steps("eager", dtype)
    exact_losses, exact_gradients = first_steps("reference", dtype, exact=True)
    for step, (loss, eager, exact) in enumerate(zip(losses, eager_losses, exact_losses, strict=False)):
        assert abs(loss - exact) <= max(2 * abs(eager - exact), roundings * exact), f"step {step}: {loss}, {eager}, {exact}"
    assert gradients.keys() == exact_gradients.keys() == dict(Llama(CONFIG, None).named_parameters()).keys()
    for name, exact in exact_gradients.items():
        error, eager_error = ((g[name] - exact).norm() / exact.norm() for g in (gradients, eager_gradients))
        assert error <= max(2 * eager_error, roundings), f"{name}: {error:.2e}, {eager_error:.2e}, {roundings:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", OPS)
def test_the_first_steps_agree(ops: str, dtype: torch.dtype) -> None:
    assert_agrees(ops, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", ["eager", *OPS])
def test_compiles_as_one_graph(ops: str, dtype: torch.dtype) -> None:
    assert_agrees(ops, dtype, compiled=True)


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`python examples/train.py` on a CPU, as a user starts it: without the interpreter that these tests run under."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    line = [sys.executable, "examples/train.py", "--device", "cpu", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_command(tmp_path: Path) -> None:
    plot, result = tmp_path / "loss.png", tmp_path / "result.json"
    small = ("--size", "tiny", "--steps", "2", "--batch", "2", "--length", "32")
    done = command("--ops", "eager", *small, "--plot", str(plot), "--json", str(result))
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert sorted(tmp_path.iterdir()) == [plot, result]
    measured = json.loads(result.read_text())
    keys = "ops compile size vocab batch length steps parameters tokens_per_second peak_memory_bytes device driver date"
    assert measured.keys() >= {*keys.split()}
    assert measured["versions"].keys() == {"python", "torch", "triton", "helion"}
    assert [4 < loss < 8 for loss in (*measured["losses"], measured["validation_loss"])] == [True] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab", "12"], "--vocab: must hold all 256 bytes, got '12'"),
        (["--ops", "helion"], "swiglu: gate must be on a GPU, got cpu. To run without one, set TRITON_INTERPRET=1"),
    ],
)
def test_refuses_in_one_line(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1

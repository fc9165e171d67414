"""The ops under test, found by listing `kernels_reference`."""

import gc
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

import kernels_reference
from kernels_reference._accuracy import Oracle
from kernels_reference._accuracy import leaves as leaves
from kernels_reference._accuracy import outputs as outputs
from kernels_reference._draw import Draw
from kernels_reference._op import Op

BACKENDS = ("kernels_helion", "kernels_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES = sorted(m.name for m in pkgutil.iter_modules(kernels_reference.__path__) if not m.name.startswith("_"))


def load(name: str) -> Op[Any]:
    return importlib.import_module(f"kernels_reference.{name}").op


def function(op: Op[Any], backend: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{backend}.{op.name}"), op.name)


def sample_count(name: str) -> int:
    return len(list(load(name).samples(Draw("cpu", torch.float32))))


def sample(op: Op[Any], i: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Any]:
    return list(op.samples(Draw(DEVICE, dtype, seed)))[i]


def peak(call: Callable[..., Any], *arguments: Any) -> int:
    """The bytes of the GPU's memory that a call takes at most."""
    gc.collect()  # What other tests left would be freed during the call,
    torch.cuda.empty_cache()  # and what they had allocated is larger than what is asked for.
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*arguments)
    return torch.cuda.max_memory_allocated() - before


def registered(op: Op[Any], backend: str, arguments: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The registered operator, and its arguments for a call of the public function with these."""
    kernels = function(op, backend).kernels  # type: ignore[attr-defined]
    values = dict(zip(op.arguments.names, op.arguments.bind((), arguments), strict=True))
    if op.rows:
        values.pop("dim", None)
    return getattr(getattr(torch.ops, backend), op.name).default, tuple(kernels.with_needs([*values.values()], True))


def check(op: Op[Any], backend: str, arguments: Mapping[str, Any], seed: int = 1) -> None:
    """The public function against the definition in float64 and against eager; and that no input is written to."""
    oracle, before = Oracle(op, arguments, seed), {n: v.clone() for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    oracle.refuse(function(op, backend))
    for name, t in before.items():
        torch.testing.assert_close(oracle.arguments[name], t, rtol=0, atol=0, equal_nan=True)

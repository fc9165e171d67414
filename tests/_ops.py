"""The ops under test, found by listing `kernels_reference`, and how far a result may be from the oracle."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import kernels_reference
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


def registered(op: Op[Any], backend: str, arguments: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The registered operator, and its arguments for a call of the public function with these."""
    function(op, backend)
    values = dict(zip(op.arguments.names, op.arguments.bind((), arguments), strict=True))
    if op.rows:
        values.pop("dim", None)
    return getattr(getattr(torch.ops, backend), op.name).default, tuple(values.values())


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def leaves(op: Op[Any], arguments: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The arguments with fresh leaves: differentiable ones ask for gradients; all floats in `dtype` if it is given."""
    fresh = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().to(dtype or value.dtype)
            fresh[name] = value.requires_grad_() if name in op.grads else value
        elif dtype is not None and isinstance(value, torch.dtype):
            fresh[name] = dtype
    return fresh


def run(
    fn: Callable[..., Any], op: Op[Any], arguments: Mapping[str, Any], grads: Sequence[Tensor] | None = None
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Outputs, and the gradients of the arguments for these incoming gradients."""
    results = outputs(fn(**arguments))
    wanted = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and v.requires_grad}
    if grads is None or not wanted:
        return results, {}
    live = [(r, g.to(r.dtype)) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in live], list(wanted.values()), [g for _, g in live])
    return results, dict(zip(wanted, found, strict=True))


def errors(result: Tensor, oracle: Tensor) -> tuple[float, float]:
    """Norm-wise and worst elementwise error; an element counts relative to itself and to the root mean square of all."""
    finite = oracle.isfinite()
    exact, got = oracle[finite].double(), result[finite].double()
    if not exact.numel():
        return 0.0, 0.0
    difference, scale = (got - exact).abs(), exact.square().mean().sqrt()
    if scale == 0:
        return difference.max().item(), difference.max().item()
    return (difference.norm() / exact.norm()).item(), (difference / (exact.abs() + scale)).max().item()


def assert_close(op: Op[Any], what: str, result: Tensor, eager: Tensor, oracle: Tensor) -> None:
    """At most 1.5 times eager's error, or two roundings of the result's dtype where that is more.

    Eight in float32, where each step in between is rounded as coarsely as the result.
    """
    assert result.shape == oracle.shape, f"{what}: shape {tuple(result.shape)}, not {tuple(oracle.shape)}"
    special = ~oracle.isfinite()
    torch.testing.assert_close(result[special].double(), oracle[special].double(), rtol=0, atol=0, equal_nan=True)
    assert result[~special].isfinite().all(), f"{what}: {int((~result[~special].isfinite()).sum())} elements are not finite"
    roundings = op.slack.get(result.dtype, 8 if result.dtype == torch.float32 else 2) * torch.finfo(result.dtype).eps / 2
    pairs = zip(("norm", "worst element"), errors(result, oracle), errors(eager, oracle), strict=True)
    for kind, error, baseline in pairs:
        assert error <= max(1.5 * baseline, roundings), (
            f"{what}: {kind} {error:.2e}; eager {baseline:.2e}, allowed {roundings:.2e}"
        )


def check(op: Op[Any], backend: str, arguments: Mapping[str, Any], seed: int = 1) -> None:
    """The public function against the definition in float64 and against eager, outputs and gradients."""
    oracle_arguments = leaves(op, arguments, torch.float64)
    results = outputs(op.fn(**oracle_arguments))
    draw = Draw(DEVICE, torch.float32, seed)
    mine = leaves(op, arguments)
    fn = function(op, backend)
    dtypes = [r.dtype for r in outputs(fn(**mine))]
    incoming = [draw(*r.shape).to(dtype) for r, dtype in zip(results, dtypes, strict=True)]
    oracle, oracle_grads = run(op.fn, op, oracle_arguments, [g.double() for g in incoming])
    eager, eager_grads = run(op.eager or op.fn, op, leaves(op, arguments), incoming)
    got, got_grads = run(fn, op, mine, incoming)
    names = op.returned(mine)
    for name, r, e, o in zip(names, got, eager, oracle, strict=True):
        assert_close(op, name, r, e, o)
    assert got_grads.keys() == oracle_grads.keys()
    for name, o in oracle_grads.items():
        assert got_grads[name].dtype == arguments[name].dtype
        assert_close(op, f"gradient of {name}", got_grads[name], eager_grads[name], o)

"""What `Op.implement` promises for every op, whatever it computes."""

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from bench import offline
from kernels_reference._draw import Draw
from kernels_reference._op import Op

from . import _ops

Arguments = dict[str, Any]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def first(op: Op[Any], dtype: torch.dtype = torch.float32) -> Arguments:
    """The op's second sample: the first may be degenerate."""
    return _ops.sample(op, 1, dtype)


def tensors(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def total(results: Any) -> Tensor:
    return sum(
        (r.float() * torch.linspace(-1, 1, r.numel(), device=r.device).view(r.shape)).sum() for r in _ops.outputs(results)
    )  # type: ignore[return-value]


def gradients(fn: Callable[..., Any], op: Op[Any], arguments: Arguments) -> tuple[Tensor, ...]:
    return torch.autograd.grad(total(fn(**arguments)), [arguments[n] for n in op.grads if isinstance(arguments.get(n), Tensor)])


def test_public_signature(op: Op[Any], backend: str) -> None:
    package, fn = importlib.import_module(backend), _ops.function(op, backend)
    assert getattr(package, op.name) is fn
    assert inspect.signature(fn) == inspect.signature(op.fn)
    assert fn.__doc__ == op.fn.__doc__
    assert all(word in (fn.__doc__ or "") for word in ("Args:", "Returns:", "Raises:"))
    assert fn.__module__ == f"{backend}.{op.name}"


def test_workloads_have_costs(op: Op[Any]) -> None:
    """Of all arguments, as benchmarks ask: at least the main tensor is read, and as much is written."""
    for workload in op.workloads.values():
        arguments = workload(Draw("meta", torch.bfloat16))
        lead = next(iter(tensors(arguments).values()))
        costs = op.cost(**dict(zip(op.arguments.names, op.arguments.bind((), arguments), strict=True)))
        assert all(cost.bytes > lead.nbytes and cost.flops > 0 for cost in costs)


def test_incoming_gradients_are_not_written(op: Op[Any], backend: str) -> None:
    """Nor are inputs, as every comparison with the definition makes sure."""
    results = _ops.outputs(_ops.function(op, backend)(**_ops.leaves(op, first(op))))
    live = [r for r in results if r.requires_grad]
    incoming = [torch.ones_like(r) for r in live]
    torch.autograd.backward(live, incoming)
    assert all((g == 1).all() for g in incoming)


def test_same_twice(op: Op[Any], backend: str) -> None:
    """Deterministic; a graph that is kept gives the same again; two uses of one graph add up."""
    fn, arguments = _ops.function(op, backend), _ops.leaves(op, first(op))
    wanted = [arguments[n] for n in op.grads if isinstance(arguments.get(n), Tensor)]
    result = total(fn(**arguments))
    once, again = (torch.autograd.grad(result, wanted, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)
    torch.testing.assert_close(gradients(fn, op, arguments), once, rtol=0, atol=0)
    result.backward(retain_graph=True)
    result.backward()
    torch.testing.assert_close([t.grad for t in wanted], [2 * g for g in once], rtol=0, atol=0)


def test_square_first(op: Op[Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for as many rows as columns is right for other shapes, too."""
    if not op.rows:
        pytest.skip("no rows")
    fn, arguments = _ops.function(op, backend), first(op)
    for tunable in offline.tunables(op.name, backend).values():
        monkeypatch.setattr(tunable, "variants", {}, raising=False)
        tunable.forget()
    width, square = arguments[next(iter(op.rows))].shape[-1], dict(arguments)
    for name, kept in op.rows.items():
        if isinstance(value := arguments.get(name), Tensor):
            flat = value.reshape(-1, *value.shape[value.ndim - kept :])
            square[name] = torch.cat([flat] * (width // flat.shape[0] + 1))[:width].contiguous()
    for some in (square, arguments):
        fn.kernels.forget()  # type: ignore[attr-defined]
        _ops.check(op, backend, some)


def test_gradients_only_where_needed(op: Op[Any], backend: str) -> None:
    fn, arguments = _ops.function(op, backend), _ops.leaves(op, first(op))
    wanted = [n for n in op.grads if isinstance(arguments.get(n), Tensor)]
    all_of_them = dict(zip(wanted, gradients(fn, op, arguments), strict=True))
    for name in wanted:
        frozen = {n: v.detach() if isinstance(v, Tensor) and n != name else v for n, v in arguments.items()}
        (gradient,) = torch.autograd.grad(total(fn(**frozen)), [frozen[name]])
        torch.testing.assert_close(gradient, all_of_them[name], rtol=0, atol=0)
    with torch.no_grad():
        results = _ops.outputs(fn(**arguments))
    torch.testing.assert_close(
        results, _ops.outputs(fn(**{n: v.detach() if isinstance(v, Tensor) else v for n, v in arguments.items()}))
    )
    assert not any(r.requires_grad for r in results)


def test_expanded_incoming_gradient(op: Op[Any], backend: str) -> None:
    arguments = _ops.leaves(op, first(op))
    wanted = [arguments[n] for n in op.grads if isinstance(arguments.get(n), Tensor)]
    results = [r for r in _ops.outputs(_ops.function(op, backend)(**arguments)) if r.requires_grad]
    expanded = [torch.full((), 0.5, device=r.device, dtype=r.dtype).expand(r.shape) for r in results]
    got = torch.autograd.grad(results, wanted, expanded, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(results, wanted, [e.contiguous() for e in expanded]))


def test_empty(op: Op[Any], backend: str) -> None:
    """No elements in any one dimension: what the definition gives, without a launch."""
    arguments = first(op)
    lead = next(iter(op.rows), next(iter(op.grads)))
    batch = arguments[lead].ndim - op.rows.get(lead, 0)
    if not op.rows:
        arguments = {n: v[:0] if isinstance(v, Tensor) and v.ndim == arguments[lead].ndim else v for n, v in arguments.items()}
    else:
        arguments = {n: v[:0] if n in op.rows and isinstance(v, Tensor) and batch else v for n, v in arguments.items()}
    mine, theirs = _ops.leaves(op, arguments), _ops.leaves(op, arguments)
    got, expected = _ops.outputs(_ops.function(op, backend)(**mine)), _ops.outputs(op.fn(**theirs))
    torch.testing.assert_close(got, expected, equal_nan=True)
    torch.autograd.backward([r.sum() for r in got])
    torch.autograd.backward([r.sum() for r in expected])
    for name in op.grads:
        if isinstance(arguments.get(name), Tensor):
            torch.testing.assert_close(mine[name].grad, theirs[name].grad, equal_nan=True)


def test_double_backward_is_refused(op: Op[Any], backend: str) -> None:
    arguments = _ops.leaves(op, first(op))
    wanted = [arguments[n] for n in op.grads if isinstance(arguments.get(n), Tensor)]
    first_order = torch.autograd.grad(total(_ops.function(op, backend)(**arguments)).square(), wanted, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{op.name}: double backward is not supported"):
        total(first_order).backward()


def test_function_transforms_are_refused(op: Op[Any], backend: str) -> None:
    arguments = first(op)
    (name, *_) = op.grads
    with pytest.raises(RuntimeError, match=f"{op.name}: torch.func transforms are not supported"):
        torch.func.grad(lambda t: total(_ops.function(op, backend)(**{**arguments, name: t})))(arguments[name])


def test_compile(op: Op[Any], backend: str) -> None:
    """One graph, the same numbers, and at most two compilations for any number of rows."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if torch.cuda.is_available() else "aot_eager")
    fn = _ops.function(op, backend)
    compiled = torch.compile(fn, backend=counter, fullgraph=True)
    lead = next(iter(op.rows), None)
    for rows in (4, 5, 7):
        arguments = first(op)
        if lead is not None:
            arguments = {
                n: torch.cat([v] * rows)[:rows] if n in op.rows and isinstance(v, Tensor) else v for n, v in arguments.items()
            }
        eager, traced = _ops.leaves(op, arguments), _ops.leaves(op, arguments)
        torch.testing.assert_close(_ops.outputs(compiled(**traced)), _ops.outputs(fn(**eager)), rtol=0, atol=0)
        torch.testing.assert_close(gradients(compiled, op, traced), gradients(fn, op, eager), rtol=0, atol=0)
    assert counter.frame_count <= 2


def test_opcheck(op: Op[Any], backend: str) -> None:
    """All checks on one sample; on each, that fakes look like what kernels return; and that under other strides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opcheck reads `.grad` of what is no leaf.
        for i in range(_ops.sample_count(op.name)):
            arguments = _ops.sample(op, i, torch.float32)
            # Under the interpreter Helion's are looked at on one sample: their shapes are the other package's.
            small = sum(t.numel() for t in tensors(arguments).values()) < 4096
            if i == 1 or (small and (torch.cuda.is_available() or backend != "kernels_helion")):
                registered, values = _ops.registered(op, backend, _ops.leaves(op, arguments))
                torch.library.opcheck(registered, values, test_utils=CHECKS if i == 1 else ("test_faketensor",))
        strided = {n: t.mT.contiguous().mT if t.ndim > 1 else t for n, t in tensors(first(op)).items()}
        registered, values = _ops.registered(op, backend, _ops.leaves(op, {**first(op), **strided}))
        torch.library.opcheck(registered, values, test_utils=("test_schema", "test_faketensor"))


def test_autocast(op: Op[Any], backend: str) -> None:
    """No error; on a GPU, the dtypes of the native op."""
    arguments = {
        n: v.to(torch.bfloat16) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in first(op).items()
    }
    with torch.autocast(_ops.DEVICE, torch.bfloat16), warnings.catch_warnings():
        got = _ops.outputs(_ops.function(op, backend)(**_ops.leaves(op, arguments)))
        native = _ops.outputs((op.eager or op.fn)(**arguments))
        if _ops.DEVICE == "cuda":
            assert [r.dtype for r in got] == [r.dtype for r in native]
        torch.autograd.backward([r.float().sum() for r in got])


class TestBadInput:
    """One bad argument at a time, for each argument of each op."""

    def refused(self, op: Op[Any], backend: str, error: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            _ops.function(op, backend)(**{**first(op), **changed})

    def test_types(self, op: Op[Any], backend: str) -> None:
        for a in op.arguments.all:
            kind = ValueError if a.kind is str else TypeError
            self.refused(op, backend, kind, rf"{op.name}: {a.name} must be .*, got ", **{a.name: object()})
            if a.kind is Tensor:
                wrong = torch.zeros(2, 2, dtype=torch.complex64, device=_ops.DEVICE)
                self.refused(
                    op, backend, TypeError, rf"{op.name}: {a.name} must be a tensor of .*, got complex64", **{a.name: wrong}
                )
            elif a.kind in (int, float):
                self.refused(
                    op, backend, TypeError, rf"{op.name}: {a.name} must be an? (int|float).*, got True", **{a.name: True}
                )

    def test_binding(self, op: Op[Any], backend: str) -> None:
        fn, arguments = _ops.function(op, backend), first(op)
        name = op.arguments.names[0]
        with pytest.raises(TypeError, match=rf"{op.name}: missing .*'{name}'"):
            fn(**{n: v for n, v in arguments.items() if n != name})
        with pytest.raises(TypeError, match=rf"{op.name}: .*unexpected keyword argument 'colour'"):
            fn(**arguments, colour=1)
        with pytest.raises(TypeError, match=rf"{op.name}: multiple values for argument '{name}'"):
            fn(arguments[name], **arguments)
        with pytest.raises(TypeError, match=rf"{op.name}: too many positional arguments"):
            fn(*range(50))

    def test_devices(self, op: Op[Any], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for a in op.arguments.all[1:]:
            if a.kind is Tensor and isinstance(first(op).get(a.name), Tensor):
                elsewhere = first(op)[a.name].to("meta")
                self.refused(
                    op, backend, ValueError, f"{op.name}: {a.name} must be on {_ops.DEVICE}.*, got meta", **{a.name: elsewhere}
                )
        monkeypatch.setattr("kernels_reference._op.INTERPRET", False)
        on_cpu = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in first(op).items()}
        self.refused(op, backend, ValueError, f"{op.name}: .* must be on a GPU, got cpu.*TRITON_INTERPRET=1", **on_cpu)

    def test_gradient_of_what_has_none(self, op: Op[Any], backend: str) -> None:
        for sample in range(_ops.sample_count(op.name)):
            arguments = _ops.sample(op, sample, torch.float32)
            for name, t in tensors(arguments).items():
                if t.is_floating_point() and name not in op.grads:
                    with pytest.raises(ValueError, match=f"{op.name}: {name} must not require grad"):
                        _ops.function(op, backend)(**{**arguments, name: t.clone().requires_grad_()})

"""Repeated calls, which are replayed: right for new contents, and where anything that a kernel depends on changes between."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_reference._accuracy import Oracle
from kernels_reference._op import Op
from kernels_reference._replay import Replays

from . import _ops

Arguments = dict[str, Any]


def each(change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    """The change of all tensors of two dimensions or more."""
    return lambda arguments: {n: change(v) if isinstance(v, Tensor) and v.ndim > 1 else v for n, v in arguments.items()}


def misaligned(t: Tensor) -> Tensor:
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


CHANGES = {
    "contents": each(lambda t: t.flip(0)),
    "strides": each(lambda t: t.mT.contiguous().mT),
    "stride 0": each(lambda t: t[..., :1, :].expand(t.shape)),
    "alignment": each(misaligned),
    "dtype": each(lambda t: t.half() if t.is_floating_point() else t),
    "one tensor": lambda arguments: {
        n: next((v for v in arguments.values() if isinstance(v, Tensor) and v.shape == t.shape and v.dtype == t.dtype), t)
        if isinstance(t, Tensor)
        else t
        for n, t in arguments.items()
    },
    "overlap": each(lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]]),
}


QUICK = [CHANGES[name] for name in ("contents", "strides", "alignment", "dtype")]


def test_changes_between_calls(op: Op[Any], backend: str) -> None:
    """The first calls run, the second are recorded, the third are replayed; then what was there before is, again."""
    plain = _ops.sample(op, 1, torch.float32)
    before, function = Oracle(op, plain), _ops.function(op, backend)
    for _ in range(2):
        right(before, function)
    for change in CHANGES.values() if torch.cuda.is_available() else QUICK:
        after = Oracle(op, change(plain))
        for oracle in (after, after, after, before):
            right(oracle, function)


def right(oracle: Oracle, function: Callable[..., Any]) -> None:
    oracle.refuse(function)
    with torch.no_grad():
        results = _ops.outputs(function(**oracle.arguments))
    for result, exact in zip(results, oracle.results, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=1e-2, atol=1e-2)


def test_warmed_calls_are_replayed(op: Op[Any], backend: str) -> None:
    kernels = _ops.function(op, backend).kernels  # type: ignore[attr-defined]
    kernels.forget()
    for _ in range(3):
        _ops.check(op, backend, _ops.sample(op, 1, torch.float32))
    for direction, replays in (("forward", kernels.replay_forward), ("backward", kernels.replay_backward)):
        assert replays.calls or direction in op.library
        assert [call is not None for call in replays.calls.values()] == [direction not in op.library] * len(replays.calls)
    recorded = [call for replays in kernels.replays for call in replays.calls.values() if hasattr(call, "backwards")]
    assert [len(call.backwards) for call in recorded] == [int("backward" not in op.library)] * ("forward" not in op.library)


def test_needs_differ(op: Op[Any], backend: str) -> None:
    """The same tensors, with and without gradients, in turns."""
    arguments = _ops.sample(op, 1, torch.float32)
    function, name = _ops.function(op, backend), next(iter(op.grads))
    expected = _ops.outputs(function(**arguments))
    for turn in range(9):
        leaf = arguments[name].detach().requires_grad_(turn % 3 > 0)
        with torch.set_grad_enabled(turn % 3 < 2):
            results = _ops.outputs(function(**{**arguments, name: leaf}))
        assert [r.requires_grad for r in results] == [turn % 3 == 1] * len(results)
        torch.testing.assert_close(results, expected)


def test_only_launches_are_replayed() -> None:
    """A call that computes with PyTorch is not."""
    replays = Replays(lambda x: (torch.empty_like(x).copy_(x), x * 2))
    for n in range(4):
        copy, double = replays(torch.full((2,), float(n)))
        assert copy.tolist() == [n, n]
        assert double.tolist() == [2 * n, 2 * n]
    assert list(replays.calls.values()) == [None]


def test_results_are_new_each_time(op: Op[Any], backend: str) -> None:
    arguments = _ops.sample(op, 1, torch.float32)
    results = [_ops.outputs(_ops.function(op, backend)(**arguments))[0] for _ in range(4)]
    assert len({r.data_ptr() for r in results}) == 4
    results[0].zero_()
    torch.testing.assert_close(results[2], results[3])


def test_bad_input_after_good(op: Op[Any], backend: str) -> None:
    arguments = _ops.sample(op, 1, torch.float32)
    for _ in range(3):
        _ops.function(op, backend)(**arguments)
    name = next(iter(arguments))
    for wrong in (None, [1.0], arguments[name].double(), ([],), {}):
        with pytest.raises((TypeError, ValueError), match=f"{op.name}: {name} must be"):
            _ops.function(op, backend)(**{**arguments, name: wrong})

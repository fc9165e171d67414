"""linear_cross_entropy: parts of the logits, gradients made ahead, and what they may be used for."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_reference import _linear_cross_entropy
from kernels_reference import linear_cross_entropy as definition
from kernels_reference._draw import Draw
from kernels_reference.linear_cross_entropy import head, op

from . import _ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def arguments(dtype: torch.dtype, *shape: int, **options: Any) -> dict[str, Any]:
    return head(*shape, **options)(Draw(_ops.DEVICE, dtype))


MEMORIES = (0.0, 0.3, 1.0)
PAIRS = list(itertools.product(DTYPES, MEMORIES) if _ops.DEVICE == "cuda" else zip(DTYPES, MEMORIES, strict=True))


@pytest.mark.parametrize(("dtype", "extra_memory"), PAIRS)
def test_weight_gradient_of_many_parts(
    backend: str, dtype: torch.dtype, extra_memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within two roundings of float64, as everything else, with some logits computed twice, or none."""
    monkeypatch.setattr(_linear_cross_entropy, "AT_A_TIME", 1 << 12)
    _ops.check(op, backend, arguments(dtype, 24, 16, 1100, extra_memory=extra_memory))


def test_small_gradients_of_a_mean(backend: str) -> None:
    """Each row's gradient is divided by their number, and most are far below float16's smallest number."""
    _ops.check(op, backend, arguments(torch.float16, 1000, 8, 40))


@pytest.mark.parametrize("extra_memory", [0.0, 1.0])
def test_a_kept_graph_gives_fresh_gradients(backend: str, extra_memory: float) -> None:
    """The gradients were made once: a later backward changes neither them nor what an earlier one returned."""
    leaves = _ops.leaves(op, arguments(torch.float32, 33, 16, 129, bias=True, extra_memory=extra_memory))
    wanted = [leaves[n] for n in ("input", "linear_weight", "linear_bias")]
    loss = _ops.function(op, backend)(**leaves)
    once = torch.autograd.grad(loss, wanted, torch.tensor(1.0, device=_ops.DEVICE), retain_graph=True)
    kept = [g.clone() for g in once]
    thrice = torch.autograd.grad(loss, wanted, torch.tensor(3.0, device=_ops.DEVICE), retain_graph=True)
    none = torch.autograd.grad(loss, wanted, torch.tensor(0.0, device=_ops.DEVICE), retain_graph=True)
    last = torch.autograd.grad(loss, wanted, torch.tensor(-1.0, device=_ops.DEVICE))
    torch.testing.assert_close(list(once), kept, rtol=0, atol=0)
    torch.testing.assert_close(list(thrice), [3 * g for g in kept])
    assert not any(g.any() for g in none)
    torch.testing.assert_close(list(last), [-g for g in kept])


def test_two_losses_of_one_head(backend: str) -> None:
    """A loss that is scaled, and one that is not, of the same weight: their gradients add up."""
    leaves = _ops.leaves(op, arguments(torch.float32, 33, 16, 129))
    other = leaves["input"].detach().flip(0).requires_grad_()

    def total(fn: Any) -> Tensor:
        return fn(**leaves) + 0.25 * fn(**{**leaves, "input": other})

    wanted = [leaves["input"], other, leaves["linear_weight"]]
    got = torch.autograd.grad(total(_ops.function(op, backend)), wanted)
    torch.testing.assert_close(got, torch.autograd.grad(total(definition), wanted))


def test_accumulates_into_grad(backend: str) -> None:
    """What a parameter keeps is its own: the next step's forward does not write to it."""
    leaves = _ops.leaves(op, arguments(torch.float32, 33, 16, 129))
    weight = leaves["linear_weight"]
    for step in (1, 2, 3):
        _ops.function(op, backend)(**leaves).backward()
        expected = torch.autograd.grad(definition(**leaves), weight)[0]
        torch.testing.assert_close(weight.grad, step * expected)


def test_refusals(backend: str) -> None:
    fn, good = _ops.function(op, backend), arguments(torch.float32, 3, 8, 5)
    for changed, error, match in (
        ({"linear_weight": good["linear_weight"][0]}, ValueError, r"linear_weight must have shape \(V, H\).*got \(8,\)"),
        ({"linear_weight": good["linear_weight"].half()}, TypeError, "linear_weight must have the dtype of input, .*float16"),
        ({"input": good["input"][:, :7]}, ValueError, r"input must have shape \(..., 8\).*got \(3, 7\)"),
        ({"linear_bias": good["input"][0]}, ValueError, r"linear_bias must have shape \(5,\), got \(8,\)"),
        ({"target": good["target"][:2]}, ValueError, r"target must have the shape \(3,\) of the rows, got \(2,\)"),
        ({"weight": good["input"][0]}, ValueError, r"weight must have shape \(5,\), got \(8,\)"),
        ({"extra_memory": -1.0}, ValueError, "extra_memory must be 0 or more, got -1.0"),
        ({"softcap": 0.0}, ValueError, "softcap must be more than 0"),
        ({"reduction": "median"}, ValueError, "reduction must be"),
    ):
        with pytest.raises(error, match=f"linear_cross_entropy: {match}"):
            fn(**{**good, **changed})


@pytest.mark.gpu
@pytest.mark.parametrize(("extra_memory", "most"), [(1.0, 2.25), (0.44, 1.7), (0.0, 1.25)])
def test_memory(backend: str, extra_memory: float, most: float) -> None:
    """Beyond the arguments, the gradients included: 5.9 GiB with PyTorch's own ops."""
    torch.use_deterministic_algorithms(False)
    leaves = _ops.leaves(op, arguments(torch.bfloat16, 8192, 4096, 128256, extra_memory=extra_memory))
    fn = _ops.function(op, backend)
    for _ in range(3):
        leaves["input"].grad = leaves["linear_weight"].grad = None
        assert _ops.peak(lambda: fn(**leaves).backward()) < most * 2**30

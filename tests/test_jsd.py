"""Jensen-Shannon divergence: values and formulas that papers publish, the two KL divergences at its ends, and small ones."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels_reference
from kernels_reference.jsd import op

from . import _ops

INF = torch.inf


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(_ops.DEVICE, dtype)


def test_definition_is_as_published() -> None:
    """The mixture of probabilities, as GKD writes it; KL at the ends; that of two certain and different things is log 2."""
    x, y = (randn(3, 5, 7, seed=seed).double().log_softmax(-1) for seed in (1, 2))
    p, q = y.exp(), x.exp()
    for beta in (0.1, 0.5, 0.9):
        m = beta * p + (1 - beta) * q
        expected = beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()
        torch.testing.assert_close(op.fn(x, y, beta=beta, reduction="none"), expected)
        torch.testing.assert_close(op.fn(x, y, beta=beta), expected.sum() / 15)
    options: dict[str, Any] = {"reduction": "none", "log_target": True}
    torch.testing.assert_close(op.fn(x, y, beta=0.0, reduction="none"), kernels_reference.kl_div(x, y, **options))
    torch.testing.assert_close(op.fn(x, y, beta=1.0, reduction="none"), kernels_reference.kl_div(y, x, **options))
    small = [op.fn(x, y, beta=b) / min(b, 1 - b) for b in (1e-9, 1 - 1e-9)]
    torch.testing.assert_close(torch.stack(small), torch.stack([op.fn(x, y, beta=b) for b in (0.0, 1.0)]), rtol=1e-5, atol=0)


def test_known_values(backend: str) -> None:
    """Where a probability is 0, and where both are."""
    dtype = torch.float16
    x = torch.tensor(
        [[0.0, -INF, -INF], [0.0, -INF, -INF], [-INF, 0.0, -INF]], dtype=dtype, device=_ops.DEVICE
    ).requires_grad_()
    y = torch.tensor([[-INF, 0.0, -INF], [0.0, -INF, -INF], [-0.6875, -0.6875, -INF]], dtype=dtype, device=_ops.DEVICE)
    y.requires_grad_()
    out = _ops.function(op, backend)(x, y, reduction="none", dtype=torch.float32)
    p = math.exp(-0.6875)
    half = [p * math.log(2) / 2, (p * math.log(p / (p / 2 + 0.5)) - math.log(p / 2 + 0.5)) / 2, 0]
    expected = torch.tensor([[math.log(2) / 2, math.log(2) / 2, 0], [0, 0, 0], half], device=_ops.DEVICE)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, (x, y), torch.ones_like(out)))


def test_close_distributions(backend: str) -> None:
    """A divergence of 1e-7 has a right sign and digits, as has its gradient."""
    x = randn(3, 40, seed=1)
    right(backend, x, x + 1e-3 * randn(3, 40, seed=2), 2e-2, 1e-7)


def test_masked_vocabulary(backend: str) -> None:
    """Of logits: what neither chooses counts for nothing, what one of both does for a finite amount."""
    x, y = randn(3, 40, seed=1), randn(3, 40, seed=2)
    x[0, 7:], y[:2, 7:] = -INF, -INF
    right(backend, x, y, 1e-5, 1e-7)


def right(backend: str, x: Tensor, y: Tensor, rtol: float, atol: float) -> None:
    """The divergence, relatively, and its gradients."""
    labels = torch.tensor([0, 1, 0], device=_ops.DEVICE)
    options: dict[str, Any] = {"temperature": 0.7, "ignore_index": 3}
    leaves: list[Any] = [t.clone().requires_grad_() for t in (x, y)]
    exact: list[Any] = [t.double().requires_grad_() for t in (x, y)]
    out, expected = _ops.function(op, backend)(*leaves, labels, **options), op.fn(exact[0], exact[1], labels, **options)
    assert expected > 0
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=0)
    for got, grad in zip(torch.autograd.grad(out, leaves), torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(got.double(), grad, rtol=rtol, atol=atol)


def test_ignored_rows(backend: str) -> None:
    """They give nothing and get nothing, whatever they hold; where no row is left, only means have no value."""
    jsd, x, y = _ops.function(op, backend), randn(4, 33, seed=1), randn(4, 33, seed=2)
    labels, kept = torch.tensor([3, 0, -100, 3], device=_ops.DEVICE), slice(1, 3)
    x[0], y[3] = torch.nan, torch.nan
    x, y = x.requires_grad_(), y.requires_grad_()
    out = jsd(x, y, labels, temperature=2.0, ignore_index=3)
    expected = op.fn(x[kept].double(), y[kept].double(), temperature=2.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for got, right in zip(torch.autograd.grad(out, (x, y)), torch.autograd.grad(expected, (x, y)), strict=True):
        assert got[::3].eq(0).all()
        torch.testing.assert_close(got[kept], right[kept], rtol=1e-5, atol=1e-6)
    nothing = jsd(x, y, torch.full_like(labels, 3), temperature=2.0, ignore_index=3)
    assert nothing.isnan()
    assert all(g.eq(0).all() for g in torch.autograd.grad(nothing, (x, y)))


def test_frozen_teacher(backend: str) -> None:
    """Whichever end beta is at; under autocast the loss is float32."""
    for beta in (0.0, 1.0):
        x, y = randn(3, 65, dtype=torch.bfloat16, seed=1).requires_grad_(), randn(3, 65, dtype=torch.bfloat16, seed=2)
        with torch.autocast(_ops.DEVICE, torch.bfloat16):
            out = _ops.function(op, backend)(x, y, temperature=1.0, beta=beta)
        assert out.dtype == torch.float32
        exact = x.detach().double().requires_grad_()
        expected = op.fn(exact, y.double(), temperature=1.0, beta=beta)
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
        (grad,), (right,) = torch.autograd.grad(out, x), torch.autograd.grad(expected, exact)
        torch.testing.assert_close(grad, right.bfloat16())


def test_bad_input(backend: str) -> None:
    good: dict[str, Any] = {"input": randn(2, 3), "target": randn(2, 3)}
    for changed, message in (
        ({"target": randn(2, 4)}, r"target must have the shape of input, \(2, 3\), got \(2, 4\)"),
        ({"beta": 1.5}, "beta must be from 0 to 1, got 1.5"),
        ({"beta": math.nan}, "beta must be from 0 to 1, got nan"),
        ({"temperature": -1.0}, "temperature must be more than 0 and finite, or None, got -1.0"),
        ({"reduction": "max"}, "reduction must be 'batchmean' or 'mean' or 'sum' or 'none', got 'max'"),
    ):
        with pytest.raises(ValueError, match=f"jsd: {message}"):
            _ops.function(op, backend)(**{**good, **changed})

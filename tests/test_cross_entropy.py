"""Cross entropy: PyTorch's own numbers for every option, the formulas that models publish, and what users reported."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_reference.cross_entropy import op

from . import _ops

REDUCTIONS = ("mean", "sum", "none")
INF, NAN = torch.inf, torch.nan


def cross_entropy(backend: str) -> Any:
    return _ops.function(op, backend)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype).requires_grad_()


def targets(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(below)).to(_ops.DEVICE)


def assert_same(loss: Tensor, logits: Tensor, expected: Tensor, exact: Tensor, atol: float = 1e-6) -> None:
    """The same loss, and the same gradient of it weighted row by row."""
    torch.testing.assert_close(loss.double(), expected.double(), rtol=10 * atol, atol=atol)
    weights = torch.linspace(-1, 2, loss.numel(), device=loss.device).view(loss.shape)
    (got,) = torch.autograd.grad((loss * weights).sum(), logits, retain_graph=True)
    (right,) = torch.autograd.grad((expected * weights).sum(), exact, retain_graph=True)
    torch.testing.assert_close(got.double(), right.double(), rtol=10 * atol, atol=atol)


def test_as_torch(backend: str) -> None:
    """Weights, ignored targets, reductions and label smoothing, each with each."""
    logits, target = randn(7, 33), targets(7, below=33)
    exact = logits.detach().double().requires_grad_()
    target[2] = target[5]
    for weight, ignored, reduction, smoothing in itertools.product(
        (None, randn(33).detach().abs()), (-100, int(target[2])), REDUCTIONS, (0.0, 0.1)
    ):
        options: dict[str, Any] = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
        expected = F.cross_entropy(exact, target, None if weight is None else weight.double(), **options)
        for fn, x in ((op.fn, exact), (cross_entropy(backend), logits)):
            assert_same(fn(x, target, weight=weight, **options), x, expected, exact)


def test_published_formulas(backend: str) -> None:
    """Gemma 2's soft-capping in transformers; PaLM's z-loss, `1e-4 * log(Z) ** 2`, and its gradient through `lse` alone."""
    logits, target = randn(5, 65), targets(5, below=65)
    exact = logits.detach().double().requires_grad_()
    final = torch.tanh((exact * 20) / 30.0) * 30.0
    log_z = torch.log(torch.exp(final).sum(-1))
    expected = (log_z - final[torch.arange(5), target] + 1e-2 * log_z**2).mean()
    loss, lse = cross_entropy(backend)(logits * 20, target, softcap=30.0, z_loss=1e-2, return_lse=True)
    torch.testing.assert_close(lse, log_z.float())
    (through_lse,) = torch.autograd.grad(lse.square().sum(), logits, retain_graph=True)
    (right,) = torch.autograd.grad(log_z.square().sum(), exact, retain_graph=True)
    torch.testing.assert_close(through_lse.double(), right, rtol=1e-5, atol=1e-5)
    assert_same(loss, logits, expected, exact)


def test_known_values(backend: str) -> None:
    rows = [[1e4, 0, -1e4], [1e4, 0, -1e4], [1e4, 9990, 0], [1, -INF, 0], [-INF, 0, -INF], [-INF] * 3, [NAN, 0, 0], [0, INF, 0]]
    logits = torch.tensor(rows, device=_ops.DEVICE, requires_grad=True)
    target = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], device=_ops.DEVICE)
    loss, lse = cross_entropy(backend)(logits, target, reduction="none", return_lse=True)
    expected = torch.tensor([1e4, 0, 4.54e-5, INF, 0, NAN, NAN, INF], device=_ops.DEVICE)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1), equal_nan=True)
    (gradient,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    torch.testing.assert_close(gradient[:2], torch.tensor([[1.0, -1, 0], [0, 0, 0]], device=_ops.DEVICE))
    torch.testing.assert_close(gradient[3], torch.tensor([0.7310586, -1, 0.2689414], device=_ops.DEVICE))


def test_ignored_rows(backend: str) -> None:
    """They give nothing and get nothing, whatever their logits; where no row is left, only "mean" has no value."""
    logits, fn = randn(3, 5), cross_entropy(backend)
    with torch.no_grad():
        logits[1] = NAN
    for reduction, value in zip(REDUCTIONS, (NAN, 0.0, [0.0] * 3), strict=True):
        for options in ({}, {"z_loss": 1.0, "label_smoothing": 0.1, "weight": torch.ones(5, device=_ops.DEVICE)}):
            loss = fn(logits, torch.full((3,), -100, device=_ops.DEVICE), reduction=reduction, **options)
            torch.testing.assert_close(loss, torch.tensor(value, device=_ops.DEVICE), equal_nan=True)
            assert torch.autograd.grad(loss.sum(), logits)[0].eq(0).all()
    loss = fn(logits, torch.tensor([4, 0, 2], device=_ops.DEVICE), ignore_index=0, z_loss=1.0)
    kept = logits.detach()[::2]
    torch.testing.assert_close(loss, fn(kept, torch.tensor([4, 2], device=_ops.DEVICE), z_loss=1.0))


def test_sequences_first(backend: str) -> None:
    """(s, b, v) views of (b, s, v), a stepped vocabulary and one row alone: as the contiguous tensor, and without a copy."""
    batch, fn = randn(2, 3, 130), cross_entropy(backend)
    target, options = targets(3, 2, below=65), {"reduction": "none", "return_lse": True}
    for view in (batch[..., :65].transpose(0, 1), batch[..., ::2].transpose(0, 1)):
        for got, expected in zip(fn(view, target, **options), fn(view.contiguous(), target, **options), strict=True):
            assert_same(got, batch, expected, batch)
        one = fn(view[0, 0], target[0, 0], reduction="none")
        torch.testing.assert_close(one, F.cross_entropy(view[0, 0], target[0, 0]))


@pytest.mark.parametrize("V", [102400, 152064, 262144])
def test_large_vocabularies(backend: str, V: int) -> None:
    logits, target = randn(1, V), targets(1, below=V)
    exact = logits.detach().double().requires_grad_()
    loss = cross_entropy(backend)(logits, target, z_loss=1e-4)
    expected = F.cross_entropy(exact, target) + 1e-4 * exact.logsumexp(-1).square().mean()
    assert_same(loss, logits, expected, exact)


@pytest.mark.parametrize("M", [1, 31, 129, 600])
def test_numbers_of_rows(backend: str, M: int) -> None:
    logits, target = randn(M, 9), targets(M, below=9)
    exact = logits.detach().double().requires_grad_()
    assert_same(cross_entropy(backend)(logits, target), logits, F.cross_entropy(exact, target), exact)


def test_dtypes(backend: str) -> None:
    """A float32 loss needs no float32 logits; autocast gives one, as the native op; int32 targets."""
    logits, target, fn = randn(4, 33, dtype=torch.bfloat16), targets(4, below=33), cross_entropy(backend)
    loss = fn(logits, target.int(), dtype=torch.float32)
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target))
    assert fn(logits, target).dtype == torch.bfloat16
    with torch.autocast(_ops.DEVICE, torch.bfloat16):
        torch.testing.assert_close(fn(logits, target), loss, rtol=0, atol=0)
    assert torch.autograd.grad(loss, logits)[0].dtype == torch.bfloat16


def test_targets_out_of_range(backend: str) -> None:
    """Refused on a CPU. Where no one can look, the row is NaN and its neighbours are right."""
    logits, right = randn(4, 33), torch.tensor([0, 1, 32, 3], device=_ops.DEVICE)
    wrong = right.clone()
    wrong[1], wrong[2] = 33, -7
    if _ops.DEVICE == "cpu":
        with pytest.raises(ValueError, match="cross_entropy: target must be from 0 to 32 or ignore_index, got 33"):
            cross_entropy(backend)(logits, wrong)
    arguments = {"logits": logits, "target": wrong, "weight": torch.ones(33, device=_ops.DEVICE), "reduction": "none"}
    registered, values = _ops.registered(op, backend, arguments)
    loss = registered(*values)[0]
    (gradient,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    expected = F.cross_entropy(logits, right, reduction="none")
    (right_gradient,) = torch.autograd.grad(expected, logits, torch.ones_like(loss))
    for got, good in ((loss, expected), (gradient, right_gradient)):
        assert got[1:3].isnan().all()
        torch.testing.assert_close(got[::3], good[::3])


def test_bad_input(backend: str) -> None:
    good: dict[str, Any] = {"logits": randn(2, 3).detach(), "target": targets(2, below=3)}
    for changed, message in (
        ({"logits": randn(2, 0).detach()}, r"logits must have one class or more, got shape \(2, 0\)"),
        ({"logits": torch.ones((), device=_ops.DEVICE)}, r"logits must have one class or more, got shape \(\)"),
        ({"target": targets(3, below=3)}, r"target must have the shape \(2,\) of the rows, got \(3,\)"),
        ({"weight": torch.ones(2, device=_ops.DEVICE)}, r"weight must have shape \(3,\), got \(2,\)"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, got 1.5"),
        ({"z_loss": -1.0}, "z_loss must be 0 or more, got -1.0"),
        ({"softcap": 0.0}, "softcap must be more than 0 or None, got 0.0"),
        ({"dtype": torch.int64}, "dtype must be float32, float16, bfloat16 or None, got torch.int64"),
        ({"reduction": "max"}, "reduction must be 'mean' or 'sum' or 'none', got 'max'"),
    ):
        with pytest.raises(ValueError, match=f"cross_entropy: {message}"):
            cross_entropy(backend)(**{**good, **changed})


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits(backend: str) -> None:
    logits = torch.randn(16800, 128256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(128256, (16800,), device="cuda")
    loss = cross_entropy(backend)(logits, target, reduction="none", dtype=torch.float32)
    last = logits.detach()[-8:].clone().requires_grad_()
    expected = cross_entropy(backend)(last, target[-8:], reduction="none", dtype=torch.float32)
    torch.testing.assert_close(loss[-8:], expected)
    (gradient,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    (right,) = torch.autograd.grad(expected, last, torch.ones_like(expected))
    torch.testing.assert_close(gradient[-8:], right)

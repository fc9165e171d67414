"""Layer norm: PyTorch's own numbers, rows far from zero, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_reference.layer_norm import op

from . import _ops


def layer_norm(backend: str) -> Any:
    return _ops.function(op, backend)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE)


@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 769), (4, 8200)])
def test_as_torch(backend: str, shape: tuple[int, ...]) -> None:
    x, weight, bias = (t.requires_grad_() for t in (randn(*shape), randn(shape[-1]), randn(shape[-1] + 1)[1:]))
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.layer_norm(exact[0], shape[-1:], exact[1], exact[2], 1e-6)
    out = layer_norm(backend)(x, weight, bias, 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grad = randn(*shape)
    got = torch.autograd.grad(out, (x, weight, bias), grad)
    right = torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close([g.double() for g in got], list(right), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [769, 33001])
def test_rows_far_from_zero(backend: str, width: int) -> None:
    """Neither lanes beyond the row nor cancellation enter the variance."""
    out = layer_norm(backend)(randn(3, width) + 1000)
    torch.testing.assert_close(out.std(-1, correction=0), torch.ones(3, device=out.device), rtol=1e-3, atol=0)
    torch.testing.assert_close(out.mean(-1), torch.zeros(3, device=out.device), rtol=0, atol=1e-3)


def test_constant_rows(backend: str) -> None:
    """They have no variance: nothing is left but the bias, and gradients are finite."""
    x, bias = torch.full((3, 100), 7.0, device=_ops.DEVICE, requires_grad=True), randn(100)
    out = layer_norm(backend)(x, None, bias)
    torch.testing.assert_close(out, bias.expand(3, 100))
    (grad,) = torch.autograd.grad(out, x, randn(3, 100))
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("present", "rows"),
    [((True, False), 5), ((False, True), 5), ((True, True), 5), ((True, True), 1100), ((False, True), 1100)],
)
def test_any_of_weight_and_bias(backend: str, present: tuple[bool, bool], rows: int) -> None:
    """With few rows and with many, whose backward is another kernel, and for each subset of gradients the same."""
    x, grad = randn(rows, 60), randn(rows, 60)
    tensors = [x, *(randn(60 + i)[i:] if there else None for i, there in enumerate(present))]
    exact = [None if t is None else t.double().requires_grad_() for t in tensors]
    expected = torch.nn.functional.layer_norm(exact[0], (60,), *exact[1:])  # type: ignore[arg-type]
    right = torch.autograd.grad(expected, [t for t in exact if t is not None], grad.double())
    for only in range(4):
        live = [t if t is None else t.detach().requires_grad_(only in (3, i)) for i, t in enumerate(tensors)]
        wanted = [t for t in live if t is not None and t.requires_grad]
        if not wanted:
            continue
        got = torch.autograd.grad(layer_norm(backend)(*live), wanted, grad)
        known = [r for r, t in zip(right, [t for t in live if t is not None], strict=True) if t.requires_grad]
        torch.testing.assert_close([g.double() for g in got], known, rtol=1e-4, atol=1e-4)


def test_bad_input(backend: str) -> None:
    fn, x = layer_norm(backend), randn(3, 8)
    for arguments, message in (
        ((x[0, 0],), "x must have one dimension or more, got a scalar"),
        ((x, x), r"weight must have shape \(8,\), as x's last, got \(3, 8\)"),
        ((x, None, x[0, :7]), r"bias must have shape \(8,\), as x's last, got \(7,\)"),
        ((x, None, None, -1.0), "eps must be 0 or more, got -1.0"),
    ):
        with pytest.raises(ValueError, match=f"layer_norm: {message}"):
            fn(*arguments)

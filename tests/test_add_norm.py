"""The sum and its norm, as separate ops give them; one gradient where both terms have one dtype; what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from . import _ops

NORMS = {"add_rms_norm": "rms_norm", "add_layer_norm": "layer_norm"}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def function(name: str, backend: str) -> Any:
    return _ops.function(_ops.load(name), backend)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("stream", [torch.float16, torch.float32])
def test_as_two_ops(backend: str, name: str, stream: torch.dtype) -> None:
    """Bit for bit the same values, and in a float16 stream the same gradients."""
    x, residual, weight = randn(5, 129, dtype=torch.float16), randn(6, 129)[1:].to(stream), randn(129, dtype=torch.float16)
    live = [t.requires_grad_() for t in (x, residual, weight)]
    out, total = function(name, backend)(*live)
    assert torch.equal(total, x + residual)
    assert (out.dtype, total.dtype) == (torch.float16, stream)
    eps = {"eps": torch.finfo(torch.float16).eps} if name == "add_rms_norm" else {}
    apart = function(NORMS[name], backend)((x + residual).detach(), weight, **eps).to(torch.float16)
    torch.testing.assert_close(out, apart, rtol=0, atol=0)
    grads = torch.autograd.grad((out, total), live, (torch.ones_like(out), randn(5, 129).to(stream)))
    assert [g.dtype for g in grads] == [torch.float16, stream, torch.float16]
    torch.testing.assert_close(grads[0].float(), grads[1].float(), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_a_gradient_for_each_term(backend: str, name: str) -> None:
    """That both are the same does not make them one: they accumulate apart, and each alone is the same."""
    x, residual = (randn(5, 40 + i)[:, i:].clone().requires_grad_() for i in (0, 1))
    out, total = function(name, backend)(x, residual)
    (out.sin().sum() + total.cos().sum()).backward()
    assert x.grad is not None
    assert residual.grad is not None
    torch.testing.assert_close(x.grad, residual.grad, rtol=0, atol=0)
    before = residual.grad.clone()
    x.grad.zero_()
    torch.testing.assert_close(residual.grad, before, rtol=0, atol=0)
    for leaf, other in ((x, residual), (residual, x)):
        out, total = function(name, backend)(*(t if t is leaf else t.detach() for t in (x, residual)))
        (alone,) = torch.autograd.grad(out.sin().sum() + total.cos().sum(), leaf)
        torch.testing.assert_close(alone, before, rtol=0, atol=0)
        assert other is not leaf


@pytest.mark.parametrize("name", NORMS)
def test_one_output_alone(backend: str, name: str) -> None:
    """Either output may go unused."""
    x, residual = randn(5, 40).requires_grad_(), randn(5, 41)[:, 1:].requires_grad_()
    fn = function(name, backend)
    torch.testing.assert_close(torch.autograd.grad(fn(x, residual)[1].sum(), x)[0], torch.ones_like(x))
    (got,) = torch.autograd.grad(fn(x, residual)[0].sin().sum(), residual)
    exact = [t.detach().double().requires_grad_() for t in (x, residual)]
    (right,) = torch.autograd.grad(_ops.load(name).fn(*exact)[0].sin().sum(), exact[1])
    torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_bad_input(backend: str, name: str) -> None:
    fn, x = function(name, backend), randn(3, 8)
    with pytest.raises(ValueError, match=rf"{name}: residual must have the shape \(3, 8\) of x, got \(3, 7\)"):
        fn(x, x[:, :7])
    with pytest.raises(
        ValueError, match=rf"{name}: residual must be torch.float32, as x is, or torch.float32, got torch.float16"
    ):
        fn(x, x.half())
    with pytest.raises(ValueError, match=rf"{name}: weight must have shape \(8,\), as x's last, got \(7,\)"):
        fn(x, x, x[0, :7])
    with pytest.raises(ValueError, match=rf"{name}: eps must be 0 or more, got -1.0"):
        fn(x, x, eps=-1.0)
    with pytest.raises(ValueError, match=rf"{name}: x must have one dimension or more, got a scalar"):
        fn(x[0, 0], x[0, 0])

"""Log softmax: PyTorch's own values, masks, logits so large that differences of them cancel, and long rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_reference.log_softmax import op

from . import _ops

INF, NAN = torch.inf, torch.nan
LONG = 33008
"""So many elements of any dtype do not stay on the chip."""


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def padded(rows: list[list[float]], width: int) -> Tensor:
    """The rows at the start of rows of `-inf`."""
    x = torch.full((len(rows), width), -INF, device=_ops.DEVICE)
    x[:, : len(rows[0])] = torch.tensor(rows, device=_ops.DEVICE)
    return x


@pytest.mark.parametrize("width", [4, LONG])
def test_known_values(backend: str, width: int) -> None:
    rows = [[0.0, -INF, 0.0, -INF], [-INF] * 4, [0.0, INF, 0.0, -INF], [0.0, NAN, 0.0, -INF], [NAN, INF, 0.0, -INF]]
    x = padded(rows, width).requires_grad_()
    out = _ops.function(op, backend)(x)
    torch.testing.assert_close(out[0, :4].cpu(), torch.tensor([-0.6931, -INF, -0.6931, -INF]), rtol=0, atol=1e-4)
    assert out[1:].isnan().all()
    (grad,) = torch.autograd.grad(out[0, 0], x)
    torch.testing.assert_close(grad[0, :4].cpu(), torch.tensor([0.5, 0.0, -0.5, 0.0]))


@pytest.mark.parametrize(("shape", "dim"), [((3, 7), -1), ((37, 5), 0), ((2, 5, 9), 1), ((1, LONG), 1), ((1, 33001), 1)])
def test_as_torch(backend: str, shape: tuple[int, ...], dim: int) -> None:
    x, grad = randn(*shape).requires_grad_(), randn(*shape).flip(0)
    exact = x.detach().double().requires_grad_()
    out, expected = _ops.function(op, backend)(x, dim), F.log_softmax(exact, dim)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    (got,), (right,) = (torch.autograd.grad(y, t, grad.to(y.dtype)) for y, t in ((out, x), (expected, exact)))
    torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.sum(dim), torch.zeros_like(got.sum(dim)), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_large_logits(backend: str, dtype: torch.dtype) -> None:
    """The differences of the logits are exact, and so no error grows with them."""
    x = (8 * randn(5, 300)).to(dtype)
    x[0] += 1e4
    x[1] -= 1e4
    x[2:] *= 1e3
    _ops.check(op, backend, {"x": x})
    alone = x[:1, :2].clone()
    alone[0] = torch.tensor([1e4, 1e4 - 8])
    torch.testing.assert_close(_ops.function(op, backend)(alone).double(), F.log_softmax(alone.double(), -1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("width", [300, LONG])
def test_masked_by_the_least_number(backend: str, width: int) -> None:
    """Which stays finite, as in PyTorch."""
    x = randn(2, width)
    x[0, 1:] = x[1, : width - 7] = torch.finfo(x.dtype).min
    _ops.check(op, backend, {"x": x})


@pytest.mark.gpu
@pytest.mark.parametrize("width", [LONG, 33001])
def test_large_logits_in_long_rows(backend: str, width: int) -> None:
    """Which rests on products that are not rounded before they are added to, as Triton's interpreter does round them."""
    _ops.check(op, backend, {"x": 1e4 + randn(2, width)})
    _ops.check(op, backend, {"x": randn(2, width) - 1e4})


def test_bad_input(backend: str) -> None:
    log_softmax = _ops.function(op, backend)
    with pytest.raises(ValueError, match="log_softmax: x must have one dimension or more, got a scalar"):
        log_softmax(randn())
    with pytest.raises(ValueError, match=r"log_softmax: dim must be from -2 to 1 for x of shape \(3, 4\), got 2"):
        log_softmax(randn(3, 4), 2)

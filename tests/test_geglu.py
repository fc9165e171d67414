"""GeGLU: both forms of gelu, its packed layouts, the formulas that models publish."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_reference._glu import split
from kernels_reference.geglu import op

from . import _ops

forms = pytest.mark.parametrize("approximate", ["none", "tanh"])


def geglu(backend: str) -> Any:
    return _ops.function(op, backend)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def test_known_values(backend: str) -> None:
    """The forms differ at -3: -0.0041 and -0.0036."""
    inf, nan = torch.inf, torch.nan
    gate = torch.tensor([0.0, 1.0, -3.0, 3.0, -100.0, 100.0, inf, -inf, nan, 1.0], device=_ops.DEVICE)
    up = torch.tensor([5.0, 2.0, 1.0, -2.0, 7.0, 7.0, 2.0, 2.0, 2.0, -inf], device=_ops.DEVICE)
    for approximate, expected in (
        ("none", [0.0, 1.6826895, -0.0040497, -5.9919004, 0.0, 700.0, inf, nan, nan, -inf]),
        ("tanh", [0.0, 1.6823840, -0.0036374, -5.9927254, 0.0, 700.0, inf, nan, nan, -inf]),
    ):
        got = geglu(backend)(gate, up, approximate=approximate)
        torch.testing.assert_close(got, torch.tensor(expected, device=_ops.DEVICE), rtol=1e-5, atol=1e-7, equal_nan=True)


@forms
def test_gelu_of_pytorch(backend: str, approximate: Any) -> None:
    """Value and gradient over all of its range, in float64."""
    gate = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-torch.inf, torch.inf, torch.nan])]).to(_ops.DEVICE)
    gate, up = gate.requires_grad_(), torch.full_like(gate, 1.5).requires_grad_()
    out = geglu(backend)(gate, up, approximate=approximate)
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    expected = F.gelu(exact[0], approximate=approximate) * exact[1]
    got = (out, *torch.autograd.grad(out.sum(), (gate, up)))
    for g, e in zip(got, (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True):
        torch.testing.assert_close(g.double(), e, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_published_formulas(backend: str) -> None:
    """Gemma and T5 in transformers; ModernBERT, whose projection is packed; `GeluAndMul` in vLLM."""
    gate, up, packed = randn(5, 96), randn(5, 96), randn(5, 192)
    torch.testing.assert_close(geglu(backend)(gate, up, approximate="tanh"), F.gelu(gate, approximate="tanh") * up)
    new = 0.5 * gate * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (gate + 0.044715 * torch.pow(gate, 3.0))))
    torch.testing.assert_close(geglu(backend)(gate, up, approximate="tanh"), new * up)
    first, second = packed.chunk(2, -1)
    torch.testing.assert_close(geglu(backend)(packed), F.gelu(first) * second)


@forms
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("width", [7, 160])
def test_packed_is_separate(backend: str, approximate: str, interleaved: bool, width: int) -> None:
    packed = randn(4, 9, 2 * width).requires_grad_()
    halves = [half.contiguous() for half in split(packed, None, interleaved)]
    got = geglu(backend)(packed, interleaved=interleaved, approximate=approximate)
    expected = geglu(backend)(*halves, approximate=approximate)
    torch.testing.assert_close(got, expected)
    incoming = randn(4, 9, width)
    torch.testing.assert_close(*(torch.autograd.grad(y, packed, incoming)[0] for y in (got, expected)))


def test_bad_input(backend: str) -> None:
    fn, x = geglu(backend), randn(3, 4)
    for error, match, call in (
        (ValueError, r"gate must have one dimension or more, got a scalar", lambda: fn(x[0, 0], x[0, 0])),
        (ValueError, r"gate must have an even last dimension .*, got shape \(3, 3\)", lambda: fn(x[:, 1:])),
        (ValueError, r"interleaved must be False where up is given, got True", lambda: fn(x, x, interleaved=True)),
        (TypeError, r"up must have the dtype of gate, torch.float32, got torch.float16", lambda: fn(x, x.half())),
        (ValueError, r"up must have the shape of gate, \(3, 4\), got \(1, 4\)", lambda: fn(x, x[:1])),
        (ValueError, r"approximate must be 'none' or 'tanh', got 'erf'", lambda: fn(x, x, approximate="erf")),
    ):
        with pytest.raises(error, match=f"^geglu: {match}"):
            call()

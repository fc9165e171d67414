"""RMS norm: the published code of model families, mixed dtypes, and what users of such kernels reported."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_reference._draw import Draw
from kernels_reference.rms_norm import op

from . import _ops

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def llama(weight: Tensor, hidden_states: Tensor, variance_epsilon: float) -> Tensor:
    """`LlamaRMSNorm.forward` of Hugging Face; Mistral and Qwen copy it."""
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + variance_epsilon)
    return weight * hidden_states.to(input_dtype)


def gemma(weight: Tensor, x: Tensor, eps: float) -> Tensor:
    """`Gemma3RMSNorm.forward` of Hugging Face; Gemma 1 and 2 are the same."""
    output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def same_but_for_rounding(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """A sum in another order moves a few values over the middle between two of `dtype`, to the neighbour."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert (got != expected).float().mean() < 0.01


@HALVES
@pytest.mark.parametrize("mixed", [False, True], ids=["same", "mixed"])
def test_families(backend: str, dtype: torch.dtype, mixed: bool) -> None:
    """With weights so small that 1 + weight in half precision is another number."""
    norm, x, weight = _ops.function(op, backend), randn(9, 300, dtype=dtype), 0.02 * randn(300)
    weight = weight if mixed else weight.to(dtype)
    same_but_for_rounding(norm(x, weight, 1e-6, casting="llama"), llama(weight, x, 1e-6), dtype)
    same_but_for_rounding(norm(x, weight, 1e-6, offset=1.0, casting="gemma"), gemma(weight, x, 1e-6), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that its fused kernel takes no mixed dtypes.
        same_but_for_rounding(norm(x, weight, 1e-6), F.rms_norm(x, (300,), weight, 1e-6), dtype)


@pytest.mark.parametrize("dtype", _ops.DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_default_eps_is_the_dtypes(backend: str, dtype: torch.dtype) -> None:
    x, weight = 1e-3 * randn(4, 50, dtype=dtype), randn(50, dtype=dtype)
    exact = op.fn(x.double(), weight.double(), torch.finfo(dtype).eps)
    torch.testing.assert_close(_ops.function(op, backend)(x, weight).double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_plain_values(backend: str) -> None:
    norm, zeros, x = _ops.function(op, backend), torch.zeros(2, 33, device=_ops.DEVICE), 1000 + randn(3, 769)
    assert (norm(zeros, randn(33), 1e-6) == 0).all()
    assert norm(zeros, randn(33), 0.0).isnan().all()
    torch.testing.assert_close(norm(x, None, 1e-6).square().mean(-1), torch.ones(3, device=_ops.DEVICE))
    torch.testing.assert_close(norm(x, None, 1e-6, offset=1.0), norm(x, torch.ones_like(x[0]), 1e-6))


def test_weight_gradient_counts_past_256(backend: str) -> None:
    x = torch.ones(4096, 8, device=_ops.DEVICE, dtype=torch.bfloat16)
    weight = x[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(_ops.function(op, backend)(x, weight, 1e-6).sum(), weight)
    assert (grad == 4096).all()


@pytest.mark.parametrize(("rows", "width"), [(1000, 5), (2, 65537), (2, 131072)])
def test_many_rows_and_wide_ones(backend: str, rows: int, width: int) -> None:
    _ops.check(op, backend, {"x": randn(rows, width, dtype=torch.bfloat16), "weight": randn(width), "eps": 1e-6})


def test_gradient_through_a_transpose(backend: str) -> None:
    x, weight, factor = randn(2, 5, 36).requires_grad_(), randn(36).requires_grad_(), randn(2, 36, 5)
    results = [fn(x, weight, 1e-6).transpose(1, 2) for fn in (_ops.function(op, backend), op.fn)]
    got, expected = (torch.autograd.grad((r * factor).sum(), [x, weight]) for r in results)
    torch.testing.assert_close(got, expected)


def test_frozen(backend: str) -> None:
    """What needs no gradient gets none from the kernels either; the other's stays the same."""
    x, weight, grad, rstd = randn(40, 20), randn(20), randn(8, 100).view(40, 20), randn(40)
    backward = getattr(_ops.function(op, backend), "kernels").backward  # noqa: B009
    both = backward(grad, x, weight, rstd, 0.0, [True, True])
    for needs in ([True, False], [False, True]):
        for one, full, need in zip(backward(grad, x, weight, rstd, 0.0, needs), both, needs, strict=True):
            assert torch.equal(one, full) if need else one is None


def test_bad_input(backend: str) -> None:
    norm, x = _ops.function(op, backend), randn(3, 8)
    with pytest.raises(ValueError, match="rms_norm: x must have one dimension or more, got a scalar"):
        norm(x[0, 0])
    for shape in ((7,), (1, 8), (3, 8)):
        with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \(8,\), as x's last, got \("):
            norm(x, randn(*shape))
    for eps in (-1e-6, float("nan")):
        with pytest.raises(ValueError, match="rms_norm: eps must be 0 or more, got "):
            norm(x, None, eps)
    with pytest.raises(ValueError, match="rms_norm: casting must be 'none' or 'llama' or 'gemma', got 'gemma3'"):
        norm(x, casting="gemma3")


@pytest.mark.gpu
@HALVES
def test_autocast_is_the_familys(backend: str, dtype: torch.dtype) -> None:
    x, weight = randn(3, 16, dtype=dtype), randn(16)
    with torch.autocast("cuda", dtype):
        assert _ops.function(op, backend)(x, weight.to(dtype)).dtype == F.rms_norm(x, (16,), weight.to(dtype)).dtype
        assert _ops.function(op, backend)(x, weight, casting="gemma").dtype == gemma(weight, x, 1e-6).dtype
        assert _ops.function(op, backend)(x, weight, casting="llama").dtype == llama(weight, x, 1e-6).dtype


@pytest.mark.gpu
def test_last_row_past_two_to_the_31(backend: str) -> None:
    x, weight = Draw("cuda", torch.bfloat16)(524289, 4096), randn(4096, dtype=torch.bfloat16)
    found: list[tuple[Tensor, Tensor]] = []
    for rows in (x, x[-1:].clone()):
        rows.requires_grad_()
        out = _ops.function(op, backend)(rows, weight, 1e-6)
        (grad,) = torch.autograd.grad(out, rows, torch.ones_like(out))
        found.append((out[-1].detach(), grad[-1]))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

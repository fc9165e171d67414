"""Embedding: PyTorch's own results, repeated indices, padding, and indices that are none."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_reference.embedding import op

from . import _ops


def table(V: int, D: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(V)).to(_ops.DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (1,), (5, 3), (2, 3, 4)])
def test_as_torch(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, index = table(7, 33), torch.randint(0, 7, shape, dtype=dtype).to(_ops.DEVICE)
    out, expected = _ops.function(op, backend)(index, weight), F.embedding(index, weight)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, weight, grad), torch.autograd.grad(expected, weight, grad))


def test_repeated_indices_add_up(backend: str) -> None:
    """Exactly, where bfloat16 alone would stop at 256; and alike each time."""
    weight = table(5, 9, torch.bfloat16)
    index = torch.tensor([3] * 1000 + [0] + [3] * 24, device=_ops.DEVICE)
    once, again = (
        torch.autograd.grad(_ops.function(op, backend)(index, weight), weight, weight.new_ones(1025, 9))[0] for _ in range(2)
    )
    assert once[:, 0].tolist() == [1, 0, 0, 1024, 0]
    torch.testing.assert_close(once, again, rtol=0, atol=0)


@pytest.mark.parametrize("padding_idx", [0, 2, -1])
def test_padding_gets_no_gradient(backend: str, padding_idx: int) -> None:
    weight, index = table(3, 8), torch.tensor([[0, 1, 2], [2, 2, 0]], device=_ops.DEVICE)
    out = _ops.function(op, backend)(index, weight, padding_idx)
    torch.testing.assert_close(out, F.embedding(index, weight), rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    counts = [2.0, 1.0, 3.0]
    counts[padding_idx] = 0
    assert grad[:, 0].tolist() == counts


def test_indices_out_of_range(backend: str) -> None:
    weight = table(4, 8)
    for wrong in (-1, 4, 2**40):
        index = torch.tensor([1, wrong, 3], device=_ops.DEVICE)
        if not index.is_cuda:
            with pytest.raises(ValueError, match=f"embedding: index must be from 0 to 3, got {wrong}"):
                _ops.function(op, backend)(index, weight)
        kernels = _ops.function(op, backend).kernels  # type: ignore[attr-defined]
        out = kernels.run_forward(index, weight, None)[0]
        assert out.isnan().all(1).tolist() == [False, True, False]
        (grad,) = kernels.run_backward(torch.ones_like(out), index, weight, None, (True,))
        assert grad[:, 0].tolist() == [0, 1, 0, 1]


def test_bad_input(backend: str) -> None:
    fn, index, weight = _ops.function(op, backend), torch.tensor([0, 1], device=_ops.DEVICE), table(4, 8)
    for arguments, message in (
        ((index.short(), weight), "index must be"),
        ((index.float(), weight), "index must be"),
        ((index, weight[0]), r"weight must have shape \(V, D\), got \(8,\)"),
        ((index, weight, 4), "padding_idx must be from -4 to 3 or None, got 4"),
        ((index, weight, -5), "padding_idx must be from -4 to 3 or None, got -5"),
        ((index, weight, 1.0), "padding_idx must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"embedding: {message}"):
            fn(*arguments)


@pytest.mark.gpu
def test_past_two_to_the_31(backend: str) -> None:
    weight = torch.zeros(2**21 + 9, 1024, dtype=torch.bfloat16, device="cuda")
    weight[-8:] = torch.randn(8, 1024, dtype=torch.bfloat16, device="cuda")
    weight.requires_grad_()
    index = torch.arange(2**21 + 1, 2**21 + 9, device="cuda")
    out = _ops.function(op, backend)(index, weight)
    torch.testing.assert_close(out, weight[-8:], rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out, weight, out)
    torch.testing.assert_close(grad[-8:], weight[-8:], rtol=0, atol=0)
    assert not grad[:-8].any()

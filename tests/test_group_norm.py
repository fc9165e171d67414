"""Group norm: PyTorch's own numbers, memory formats, groups far from zero and of each size, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_reference._group_norm import filled, flat, is_even, room_for
from kernels_reference.group_norm import op

from . import _ops


def group_norm(backend: str) -> Any:
    return _ops.function(op, backend)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE)


def as_torch(backend: str, x: Tensor, groups: int, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result and grad_x, both like PyTorch's, as is all else."""
    C, grad = x.shape[1], randn(*x.shape) if grad is None else grad
    x, weight, bias = (t.detach().requires_grad_() for t in (x, randn(C), randn(C + 1)[1:]))
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.nn.functional.group_norm(exact[0], groups, exact[1], exact[2], 1e-6)
    out = group_norm(backend)(x, groups, weight, bias, 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(out, (x, weight, bias), grad)
    right = torch.autograd.grad(expected, exact, grad.double())
    torch.testing.assert_close([g.double() for g in got], list(right), rtol=1e-4, atol=1e-4)
    return out, got[0]


def test_instance_norm(backend: str) -> None:
    """A group for each channel."""
    as_torch(backend, randn(2, 6, 5, 7), 6)


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sliced channels": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "swapped positions": lambda t: t.mT.contiguous().mT,
    "channels between positions": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("name", FORMATS)
def test_memory_formats(backend: str, name: str) -> None:
    """The output and grad_x have the input's, whatever that of the incoming gradient is."""
    plain, groups = randn(2, 6, 5, 7), 3
    x = FORMATS[name](plain)
    assert not x.is_contiguous()
    out, grad = as_torch(backend, x, groups)
    assert out.stride() == grad.stride() == torch.empty_like(x).stride()
    as_torch(backend, plain, groups, x)


def test_channels_last_is_not_copied() -> None:
    x = randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last)
    for t in (x, x[:, 2:], x[0:1], x.mean((2, 3), keepdim=True)):
        assert is_even(t)
        assert flat(t).data_ptr() == room_for(t).data_ptr() == t.data_ptr()
    odd = x.transpose(1, 2)
    assert not is_even(odd)
    torch.testing.assert_close(filled(torch.empty_like(odd), flat(odd)), odd, rtol=0, atol=0)


LARGE = {"on the chip": (2, 4, 20, 33), "channels_last": (1, 8, 20, 33), "in parts": (1, 4, 130, 67)}


@pytest.mark.parametrize("name", LARGE)
def test_groups_far_from_zero(backend: str, name: str) -> None:
    """Neither lanes beyond the group nor cancellation enter the variance; nor does a first tile unlike the others."""
    x = randn(*LARGE[name]) + 1000
    if name == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    if name == "in parts":
        x = torch.cat([x] * 2, 1)[:, :4]  # A batch of one is together, however it lies.
        x[:, :, 0] -= 1000
    out = group_norm(backend)(x, 1).flatten(1).double()
    exact = torch.nn.functional.group_norm(x.double(), 1).flatten(1)
    torch.testing.assert_close(out, exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.std(-1, correction=0), torch.ones_like(out[:, 0]), rtol=1e-3, atol=0)


def test_constant_groups(backend: str) -> None:
    """They have no variance: nothing is left but the bias, and gradients are finite."""
    x, bias = torch.full((2, 6, 10), 7.0, device=_ops.DEVICE, requires_grad=True), randn(6)
    out = group_norm(backend)(x, 2, None, bias)
    torch.testing.assert_close(out, bias[:, None].expand(2, 6, 10))
    (grad,) = torch.autograd.grad(out, x, randn(2, 6, 10))
    assert grad.isfinite().all()


def test_nan_stays_in_its_group(backend: str) -> None:
    x = randn(2, 6, 10)
    x[0, 2, 3], x[1, 5, 0] = torch.nan, torch.inf
    out = group_norm(backend)(x, 3)
    assert torch.equal(out.isnan(), torch.nn.functional.group_norm(x, 3).isnan())


def test_sizes_of_one_first(backend: str) -> None:
    """What is compiled for one position, channel, group or sample is right for more."""
    for shape in [(1, 1, 1), (2, 3, 5)]:
        x = randn(*shape)
        exact = op.fn(x.double(), 1, None, None, 0.5)
        torch.testing.assert_close(group_norm(backend)(x, 1, None, None, 0.5).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "groups"), [((2**20 + 16, 64, 32), 8), ((3, 2, 2**29 + 24), 1), ((3, 2**24 + 8, 64), 8)], ids=str
)
def test_past_two_to_the_31(backend: str, shape: tuple[int, ...], groups: int) -> None:
    """The last sample equals that sample alone, of many small groups, of large ones, and in channels_last."""
    torch.cuda.empty_cache()
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x = x.mT if shape[2] == 64 else x
    results = []
    for part in (x, x[-1:].clone(memory_format=torch.preserve_format)):
        part.requires_grad_()
        out = group_norm(backend)(part, groups)
        (grad,) = torch.autograd.grad(out, part, part.detach())
        results.append((out.detach()[-1:].clone(), grad[-1:].clone()))
        del out, grad
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)


def test_bad_input(backend: str) -> None:
    fn, x = group_norm(backend), randn(3, 8, 2)
    for arguments, message in (
        ((x[0, 0], 1), r"x must have two dimensions or more, \(N, C, \*\), got shape \(2,\)"),
        ((x, 3), "num_groups must be 1 or more and divide x's 8 channels, got 3"),
        ((x, 0), "num_groups must be 1 or more and divide x's 8 channels, got 0"),
        ((x, 2, x), r"weight must have shape \(8,\), as x's channels, got \(3, 8, 2\)"),
        ((x, 2, None, x[0, :7, 0]), r"bias must have shape \(8,\), as x's channels, got \(7,\)"),
        ((x, 2, None, None, -1.0), "eps must be 0 or more, got -1.0"),
    ):
        with pytest.raises(ValueError, match=f"group_norm: {message}"):
            fn(*arguments)

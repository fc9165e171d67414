"""Rotary embedding: published values and formulas, memory layouts, and what users of such kernels reported."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_reference._draw import Draw
from kernels_reference.rope import op

from . import _ops

pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def rope(backend: str) -> Any:
    return _ops.function(op, backend)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def angles(T: int, R: int, interleaved: bool = False, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A cosine and a sine for each element, and the angle of each pair, at base 1e4."""
    pairs = torch.outer(torch.arange(first, first + T), 1e4 ** -(torch.arange(0, R, 2) / R)).to(_ops.DEVICE)
    each = pairs.repeat_interleave(2, -1) if interleaved else torch.cat((pairs, pairs), -1)
    return each.cos(), each.sin(), pairs


def test_known_values(backend: str) -> None:
    x = torch.arange(8.0, device=_ops.DEVICE)
    halves = [-3.3659, 0.4958, 1.9399, 2.9930, 2.1612, 5.0749, 6.0197, 7.0030]
    pairs = [-0.8415, 0.5403, 1.6905, 3.1847, 3.9498, 5.0397, 5.9930, 7.0060]
    for interleaved, expected in ((False, halves), (True, pairs)):
        for tables in ((), (1,), (2,)):
            cos, sin = (t.expand(*tables, 1, 8) for t in angles(1, 8, interleaved, first=1)[:2])
            for out in rope(backend)(x.expand(2, 3, 1, 8), x.expand(2, 1, 1, 8), cos, sin, interleaved=interleaved):
                torch.testing.assert_close(out, torch.tensor(expected, device=_ops.DEVICE).expand_as(out), rtol=0, atol=6e-5)


@pairings
def test_complex_numbers(backend: str, interleaved: bool) -> None:
    """A pair is a complex number, times exp(i * angle); its gradient is turned back. Nine heads of queries on three."""
    q, k = randn(2, 9, 13, 96).requires_grad_(), randn(2, 3, 13, 96).requires_grad_()
    cos, sin, pairs = angles(13, 96, interleaved)

    def turned(x: Tensor, sign: int) -> Tensor:
        z = x.double().unflatten(-1, (-1, 2) if interleaved else (2, -1)).movedim(-1 if interleaved else -2, -1).contiguous()
        z = torch.view_as_real(torch.view_as_complex(z) * torch.exp(sign * 1j * pairs.double()))
        return (z if interleaved else z.movedim(-1, -2)).flatten(-2).float()

    outs, incoming = rope(backend)(q, k, cos, sin, interleaved=interleaved), (randn(2, 9, 13, 96), randn(2, 3, 13, 96))
    torch.testing.assert_close(outs, (turned(q, 1), turned(k, 1)))
    torch.testing.assert_close(torch.autograd.grad(outs, (q, k), incoming), tuple(turned(g, -1) for g in incoming))


@pytest.mark.parametrize(("R", "interleaved"), [(32, False), (40, True)], ids=["phi", "glm"])
def test_published_formulas(backend: str, R: int, interleaved: bool) -> None:
    """Partial ones, as in transformers."""
    cos, sin, _ = angles(9, R, interleaved)

    def expected(x: Tensor) -> Tensor:
        x_rot, x_pass = x[..., :R], x[..., R:]
        x1, x2 = (x_rot[..., 0::2], x_rot[..., 1::2]) if interleaved else x_rot.chunk(2, dim=-1)
        turned = torch.stack((-x2, x1), dim=-1).flatten(-2) if interleaved else torch.cat((-x2, x1), dim=-1)
        return torch.cat([x_rot * cos + turned * sin, x_pass], dim=-1)

    q, k = randn(2, 4, 9, 80), randn(2, 2, 9, 80)
    torch.testing.assert_close(rope(backend)(q, k, cos, sin, interleaved=interleaved), (expected(q), expected(k)))


def test_any_number_of_positions(backend: str) -> None:
    """In one process: one position first, then more than a block has."""
    for T in (1, 17, 64, 2, 3, 4, 5, 6, 7, 8):
        q, k, (cos, sin, _) = randn(2, 3, T, 60), randn(2, 2, T, 60), angles(T, 60)
        torch.testing.assert_close(rope(backend)(q, k, cos, sin), op.fn(q, k, cos, sin))


def test_memory_layout_is_kept(backend: str) -> None:
    """Heads inside positions, in a packed projection; one query for all heads. Storage stays unchanged."""
    cos, sin, _ = angles(6, 16)
    packed, shared = randn(2, 6, 7 * 16), randn(1, 1, 6, 16)
    q, k, _ = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in packed.split([4 * 16, 2 * 16, 16], -1))
    before = [packed.clone(), shared.clone()]
    for inputs in ((q, k), (q.contiguous(), k), (shared.expand(2, 8, 6, 16), k), (q, shared.expand(2, 1, 6, 16))):
        outs = rope(backend)(*inputs, cos, sin)
        assert [out.stride() for out in outs] == [torch.empty_like(x).stride() for x in inputs]
        torch.testing.assert_close(outs, op.fn(*inputs, cos, sin))
    torch.testing.assert_close([packed, shared], before, rtol=0, atol=0)


@pairings
def test_what_passes_through_is_not_touched(backend: str, interleaved: bool) -> None:
    """Bit for bit, and whatever it is: it does not reach the turned elements."""
    x = randn(1, 2, 5, 20, dtype=torch.bfloat16)
    x[..., 12:] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40, 3.0, -1.0, 0.0])
    cos, sin, _ = angles(5, 12, interleaved)
    for out in rope(backend)(x, x, cos, sin, interleaved=interleaved):
        assert torch.equal(out[..., 12:].view(torch.int16), x[..., 12:].view(torch.int16))
        exact = op.fn(x[..., :12].double(), x[..., :12].double(), cos.double(), sin.double(), interleaved=interleaved)[0]
        torch.testing.assert_close(out[..., :12].double(), exact, rtol=2**-8, atol=1e-6)


def test_same_tensor_twice(backend: str) -> None:
    """A kernel that was built for equal arguments must not serve different ones."""
    x, table = randn(2, 4, 5, 8), randn(5, 8)
    for k, sin in ((x, table), (randn(4, 2, 5, 8).transpose(0, 1).contiguous(), randn(8, 5).t().contiguous())):
        torch.testing.assert_close(rope(backend)(x, k, table, sin), op.fn(x, k, table, sin))


@pytest.mark.parametrize("needs", [[True, False], [False, True]], ids=["k frozen", "q frozen"])
def test_frozen(backend: str, needs: list[bool]) -> None:
    x, (cos, sin, _) = randn(2, 2, 5, 8), angles(5, 8)
    (grad,) = rope(backend).kernels.run_backward(x, 2 * x, cos, sin, False, needs)
    torch.testing.assert_close(grad, op.fn(x, 2 * x, cos, -sin)[needs.index(True)])
    with pytest.raises(ValueError, match="rope: sin must not require grad, for it gets none; got requires_grad=True"):
        rope(backend)(x, x, cos, sin.requires_grad_())


def test_bad_arguments(backend: str) -> None:
    good = {"q": randn(2, 4, 5, 8), "k": randn(2, 2, 5, 8), "cos": randn(5, 8), "sin": randn(5, 8)}
    for name, shape, message in (
        ("q", (4, 5, 8), r"must have shape \(B, H, T, D\), got \(4, 5, 8\)"),
        ("k", (2, 2, 5, 6), r"must have shape \(2, K, 5, 8\) for q of shape \(2, 4, 5, 8\), got \(2, 2, 5, 6\)"),
        ("cos", (3, 5, 8), r"must have shape \(5, R\), \(1, 5, R\) or \(2, 5, R\) for q .*, got \(3, 5, 8\)"),
        ("cos", (8,), r"must have shape .*, got \(8,\)"),
        ("cos", (5, 7), "must have an even last dimension from 2 to 8, got 7"),
        ("cos", (5, 10), "must have an even last dimension from 2 to 8, got 10"),
        ("sin", (5, 4), r"must have the shape of cos, \(5, 8\), got \(5, 4\)"),
    ):
        with pytest.raises(ValueError, match=f"rope: {name} {message}"):
            rope(backend)(**{**good, name: randn(*shape)})
    with pytest.raises(TypeError, match=r"rope: k must have the dtype of q, torch\.float32, got torch\.bfloat16"):
        rope(backend)(**{**good, "k": good["k"].bfloat16()})


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["positions inside", "heads inside"])
def test_past_two_to_the_31(backend: str, inside: bool) -> None:
    """A million positions of 32 heads: the last ones, and their gradients, equal those alone."""
    T, draw = 1_000_003, Draw("cuda", torch.bfloat16)
    q, k = (draw(1, T, n, 128).transpose(1, 2) if inside else draw(1, n, T, 128) for n in (32, 1))
    cos, sin = draw(T, 128), draw(T, 128)
    last = [x[..., -9:, :].clone().requires_grad_() for x in (q, k)]
    expected = rope(backend)(*last, cos[-9:], sin[-9:])
    expected += torch.autograd.grad(expected, last, [x.detach() for x in last])
    incoming = [q.detach(), k.detach()]
    outs = rope(backend)(q.requires_grad_(), k.requires_grad_(), cos, sin)
    outs += torch.autograd.grad(outs, (q, k), incoming)
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out[..., -9:, :], wanted, rtol=0, atol=0)


@pytest.mark.gpu
def test_memory(backend: str) -> None:
    """Forward and backward allocate their results alone, in either layout."""
    cos, sin, _ = angles(1024, 128)

    def call(*live: Tensor) -> object:
        return torch.autograd.grad(rope(backend)(*live, cos, sin), live, [t.detach() for t in live])

    for q, k in ((randn(2, 1024, 8, 128).transpose(1, 2), randn(2, 2, 1024, 128)), (randn(2, 8, 1024, 128),) * 2):
        live = q.clone().requires_grad_(), k.clone().requires_grad_()
        call(*live)
        assert _ops.peak(call, *live) == 2 * (q.nbytes + k.nbytes)

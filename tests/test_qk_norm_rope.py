"""Head norm and rotary embedding in one: models' own code, memory layouts, what makes rows NaN, and errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_reference._draw import Draw
from kernels_reference.qk_norm_rope import op

from . import _ops


def qk_norm_rope(backend: str) -> Any:
    return _ops.function(op, backend)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def angles(T: int, R: int) -> tuple[Tensor, Tensor]:
    each = torch.outer(torch.arange(T), 1e4 ** -(torch.arange(0, R, 2) / R)).to(_ops.DEVICE).repeat(1, 2)
    return each.cos(), each.sin()


def norm(x: Tensor, weight: Tensor, casting: str) -> Tensor:
    """`Qwen3RMSNorm` and `Gemma3RMSNorm` of Hugging Face."""
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normed.to(x.dtype) if casting == "llama" else (normed * (1.0 + weight.float())).type_as(x)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`apply_rotary_pos_emb` of Hugging Face."""
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat((-x2, x1), -1) * sin


@pytest.mark.parametrize(("casting", "offset"), [("llama", 0.0), ("gemma", 1.0)], ids=["qwen 3", "gemma 3"])
def test_models(backend: str, casting: str, offset: float) -> None:
    """As in attention: a projection's output, seen as 9 heads of queries on 3 of keys."""
    packed, weights, (cos, sin) = randn(2, 13, 12 * 24), (0.3 * randn(24), 0.3 * randn(24).flip(0)), angles(13, 24)
    before = packed.clone()
    q, k = (x.unflatten(-1, (-1, 24)).transpose(1, 2) for x in packed.split([9 * 24, 3 * 24], -1))
    outs = qk_norm_rope(backend)(q, k, *weights, cos, sin, offset=offset, casting=casting)
    expected = tuple(turn(norm(x, w, casting), cos, sin) for x, w in zip((q, k), weights, strict=True))
    torch.testing.assert_close(outs, expected)
    assert [out.stride() for out in outs] == [torch.empty_like(x).stride() for x in (q, k)]
    torch.testing.assert_close(packed, before, rtol=0, atol=0)


@pytest.mark.parametrize("casting", ["gemma", "llama"])
def test_what_is_rounded(backend: str, casting: str) -> None:
    """The result, in the dtype of q whatever the weights have; only "llama" rounds what is normalised before."""
    (q, k), weight, (cos, sin) = (randn(2, n, 5, 8, dtype=torch.bfloat16) for n in (4, 2)), randn(8), angles(5, 8)
    outs = qk_norm_rope(backend)(q, k, weight, weight, cos, sin, casting=casting)
    for x, out in zip((q, k), outs, strict=True):
        normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
        normed = normed.float().bfloat16().double() if casting == "llama" else normed
        exact = turn(normed * weight.double(), cos.double(), sin.double())
        torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-8, atol=1e-6)


def test_zero_rows(backend: str) -> None:
    """A head of zeros is 0, and NaN with eps 0; other heads, and lanes that no head fills, are not touched by it."""
    q, k, weight, (cos, sin) = randn(2, 5, 7, 24), randn(2, 3, 7, 24), randn(24), angles(7, 24)
    zero = q.clone()
    zero[1, 2, 3] = 0
    assert (qk_norm_rope(backend)(zero, k, weight, weight, cos, sin)[0][1, 2, 3] == 0).all()
    for x in (q, zero):
        _ops.check(op, backend, {"q": x, "k": k, "q_weight": weight, "k_weight": weight, "cos": cos, "sin": sin, "eps": 0.0})


def test_any_number_of_positions(backend: str) -> None:
    """In one process: one position first, then more than a block has."""
    for T in (1, 17, 64):
        q, k, tables, weight = randn(2, 3, T, 60), randn(2, 2, T, 60), angles(T, 60), randn(60)
        torch.testing.assert_close(qk_norm_rope(backend)(q, k, weight, weight, *tables), op.fn(q, k, weight, weight, *tables))


def test_weight_gradient_counts_past_256(backend: str) -> None:
    """A sum in bfloat16 would stick there."""
    x = torch.ones(2, 4, 150, 8, device=_ops.DEVICE, dtype=torch.bfloat16)
    weight, table = x[0, 0, 0].clone().requires_grad_(), torch.ones(150, 8, device=_ops.DEVICE)
    outs = qk_norm_rope(backend)(x, x[:, :2], weight, weight.detach(), table, torch.zeros_like(table), 0.0)
    (grad,) = torch.autograd.grad([out.sum() for out in outs], weight)
    assert (grad == 1200).all()


@pytest.mark.parametrize("frozen", ["q q_weight", "k q_weight"])
def test_frozen(backend: str, frozen: str) -> None:
    """Whatever else is needed is the same."""
    arguments = _ops.sample(op, 1, torch.float32)
    live = [n for n in op.grads if n not in frozen.split()]
    results: list[Any] = []
    for fn in (qk_norm_rope(backend), op.fn):
        leaves = _ops.leaves(op, arguments)
        outs = fn(**{n: v.detach() if n in frozen.split() else v for n, v in leaves.items()})
        outs = [out for out in outs if out.requires_grad]
        results.append(torch.autograd.grad(outs, [leaves[n] for n in live], [randn(*out.shape) for out in outs]))
    torch.testing.assert_close(*results)


def test_bad_arguments(backend: str) -> None:
    good = {"q": randn(2, 4, 5, 8), "k": randn(2, 2, 5, 8), "q_weight": randn(8), "k_weight": randn(8)}
    good |= {"cos": randn(5, 8), "sin": randn(5, 8)}
    for name, shape, message in (
        ("q", (4, 5, 8), r"must have shape \(B, H, T, D\), got \(4, 5, 8\)"),
        ("k", (2, 2, 5, 6), r"must have shape \(2, K, 5, 8\) for q of shape \(2, 4, 5, 8\), got \(2, 2, 5, 6\)"),
        ("q_weight", (7,), r"must have shape \(8,\), as q's last, got \(7,\)"),
        ("k_weight", (1, 8), r"must have shape \(8,\), as q's last, got \(1, 8\)"),
        ("cos", (5, 7), "must have an even last dimension from 2 to 8, got 7"),
        ("sin", (5, 4), r"must have the shape of cos, \(5, 8\), got \(5, 4\)"),
    ):
        with pytest.raises(ValueError, match=f"qk_norm_rope: {name} {message}"):
            qk_norm_rope(backend)(**{**good, name: randn(*shape)})
    for name, other in (("k", "q"), ("k_weight", "q_weight")):
        with pytest.raises(TypeError, match=rf"{name} must have the dtype of {other}, torch\.float32, got torch\.bfloat16"):
            qk_norm_rope(backend)(**{**good, name: good[name].bfloat16()})
    with pytest.raises(ValueError, match=r"qk_norm_rope: eps must be 0 or more, got -1\.0"):
        qk_norm_rope(backend)(**good, eps=-1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True], ids=["positions inside", "heads inside"])
def test_past_two_to_the_31(backend: str, inside: bool) -> None:
    """Half a million positions of 33 heads: the last ones, and their gradients, equal those alone."""
    T, draw = 520_003, Draw("cuda", torch.bfloat16)
    q, k = (draw(1, T, n, 128).transpose(1, 2) if inside else draw(1, n, T, 128) for n in (33, 1))
    weight, cos, sin = draw(128), draw(T, 128), draw(T, 128)
    last = [x[..., -9:, :].clone().requires_grad_() for x in (q, k)]
    expected = qk_norm_rope(backend)(*last, weight, weight, cos[-9:], sin[-9:])
    expected += torch.autograd.grad(expected, last, [x.detach() for x in last])
    incoming = [q.detach(), k.detach()]
    outs = qk_norm_rope(backend)(q.requires_grad_(), k.requires_grad_(), weight, weight, cos, sin)
    outs += torch.autograd.grad(outs, (q, k), incoming)
    for out, wanted in zip(outs, expected, strict=True):
        torch.testing.assert_close(out[..., -9:, :], wanted, rtol=2**-7, atol=2**-7)

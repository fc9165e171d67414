"""Dropout, alone and before a residual sum: which elements it drops, and that nothing but index and seed decides it."""

import importlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench import offline
from kernels_reference import dropout, dropout_add
from kernels_reference._dropout import in_three, keep, mix

from . import _ops

Dropout = Callable[..., Tensor]


@pytest.fixture(params=["dropout", "dropout_add"])
def drop(request: pytest.FixtureRequest, backend: str) -> Dropout:
    """Either op as dropout alone, by a residual of zeros."""
    fn = _ops.function(_ops.load(request.param), backend)
    return fn if request.param == "dropout" else lambda x, p, seed: fn(x, torch.zeros_like(x), p, seed)


def of(name: str, backend: str) -> Dropout:
    return _ops.function(_ops.load(name), backend)


def seeded(n: int) -> Tensor:
    return torch.tensor(n, device=_ops.DEVICE)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=_ops.DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def lowbias32(h: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ h >> shift) * factor % 2**32
    return h ^ h >> 16


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 - 1, -(2**63), 0x0123456789ABCDEF])
def test_hash(seed: int) -> None:
    """The definition's, in 64 bits with masks, is that of 32-bit integers; beyond 2**32 elements, too."""
    assert mix(torch.tensor([0, 1, 2**32 - 1])).tolist() == [lowbias32(h) for h in (0, 1, 2**32 - 1)]
    low, high = seed % 2**32, (seed >> 32) % 2**32
    key0 = lowbias32((low + 0x9E3779B9) % 2**32)
    key1 = lowbias32(high ^ key0)
    for i in (0, 1, 12345, 2**31, 2**32 - 1, 2**32, 2**40 + 7):
        h = i % 2**32 ^ key0
        h = ((h ^ h >> 16) * 0x7FEB352D + key1 + (i >> 32) * 0x85EBCA6B) % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        h ^= h >> 16
        kept = [keep(torch.tensor([i]), (h + more) / 2**32, torch.tensor(seed)).item() for more in (0, 1)]
        assert kept == [True, False]


@pytest.mark.parametrize(("p", "seed"), [(0.1, -1), (0.75, 0x0123456789ABCDEF)])
def test_same_elements_everywhere(drop: Dropout, p: float, seed: int) -> None:
    """In each package and the definition, in each dtype; of shapes in rows of eight or not, a single one, or no dimension."""
    for shape, dtype in zip(((3, 5, 7), (4, 8, 72), (1,), ()), (*_ops.DTYPES, torch.float32), strict=True):
        x = randn(*shape, dtype=dtype).abs() + 1
        expected = dropout(x, p, seeded(seed)) != 0
        for t in (seeded(seed), seeded(seed)[None]):
            torch.testing.assert_close(drop(x, p, t) != 0, expected)


def test_same_elements_under_any_strides(drop: Dropout) -> None:
    x = randn(4, 6, 72).abs() + 1
    expected = dropout(x, 0.5, seeded(6)) != 0
    views = [x.permute(order).contiguous().permute(order) for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0))]
    views += [torch.cat((x, x), -1)[..., :72], x[..., :1].expand(4, 6, 72)]
    for view in views:
        out = drop(view, 0.5, seeded(6))
        torch.testing.assert_close(out != 0, expected)
        assert out.stride() == torch.empty_like(view).stride()


def test_more_dimensions_than_kernels_have(drop: Dropout) -> None:
    """As convolutions lay them out, and where only a copy helps."""
    x = randn(2, 3, 4, 5, 6).abs() + 1
    expected = dropout(x, 0.5, seeded(3))
    for order in ((0, 2, 3, 4, 1), (4, 3, 2, 1, 0), (3, 0, 4, 1, 2)):
        strided = x.permute(order).contiguous().permute([order.index(d) for d in range(5)])
        torch.testing.assert_close(drop(strided, 0.5, seeded(3)), expected)
    channels_last = randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    found = in_three(channels_last)
    assert found
    assert (found[0][0].shape, found[0][0].stride(), found[1]) == ((2, 20, 3), (60, 3, 1), [60, 1, 20])


def test_other_seeds(backend: str) -> None:
    """Each bit of the seed counts; masks of neighbouring seeds agree as often as chance has it."""
    x, n = ones(4096), 4096
    masks = [of("dropout", backend)(x, 0.5, seeded(s)) != 0 for s in (0, 1, 2, 2**31, 2**32, 2**33, 2**61, -1)]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert abs((mask == other).sum().item() - n / 2) < 5 * (n / 4) ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_fraction_kept(p: float) -> None:
    """And that no two elements near each other, in a row or between rows of common widths, are alike more than by chance."""
    n = 1 << 20
    for seed in (0, 42, 2**62 - 1):
        kept = keep(torch.arange(n), p, torch.tensor(seed)).double()
        assert abs(kept.sum().item() - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5
        centred = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
        for step in (1, 2, 3, 8, 64, 768, 1024, 1600, 4096, 65536):
            correlation = (centred[step:] * centred[:-step]).sum().item()
            assert abs(correlation) < 5 * (n - step) ** 0.5, step


def test_no_probability_and_all(backend: str) -> None:
    """p = 0 is a new tensor with equal elements; p = 1 is zeros of what may be infinite. Gradients likewise."""
    x = torch.tensor([1.0, -2.0, torch.inf, -torch.inf, torch.nan, 0.0, 3.0], device=_ops.DEVICE).repeat(3).requires_grad_()
    residual = randn(21).requires_grad_()
    for p, out, add, slope in ((0, x, x + residual, 1.0), (1, torch.zeros_like(x), residual, 0.0)):
        got = of("dropout", backend)(x, p, seeded(5))
        torch.testing.assert_close(got, out, rtol=0, atol=0, equal_nan=True)
        assert got.data_ptr() != x.data_ptr()
        assert torch.autograd.grad(got.sum(), x)[0].eq(slope).all()
        got = of("dropout_add", backend)(x, residual, p, seeded(5))
        torch.testing.assert_close(got, add, rtol=0, atol=0, equal_nan=True)
        grads = torch.autograd.grad(got, (x, residual), torch.full_like(got, torch.inf))
        assert grads[0].eq(torch.inf if slope else 0).all()
        assert grads[1].eq(torch.inf).all()


def test_dropped_infinities_and_nan(drop: Dropout) -> None:
    for value in (torch.inf, torch.nan):
        kept = dropout(ones(300), 0.5, seeded(9)) != 0
        out = drop(torch.full_like(ones(300), value), 0.5, seeded(9))
        assert out[~kept].eq(0).all()
        assert not out[kept].isfinite().any()


def test_backward_drops_the_same(drop: Dropout) -> None:
    x = ones(6, 70).requires_grad_()
    out = drop(x, 0.3, seeded(11))
    incoming = randn(6, 70) + 10
    (grad,) = torch.autograd.grad(out, x, incoming, retain_graph=True)
    torch.testing.assert_close(grad, incoming * out.detach())
    (grad,) = torch.autograd.grad(out, x, incoming.mT.contiguous().mT)
    torch.testing.assert_close(grad, incoming * out.detach())


def test_residual(backend: str) -> None:
    """Exactly itself where `x` is dropped; a sum rounded once; gradients in each one's dtype, made alone or both."""
    fn, seed = of("dropout_add", backend), seeded(2)
    x, residual = randn(5, 66, dtype=torch.bfloat16), randn(5, 66) * 100
    for stream in (residual, residual.bfloat16()):
        out, kept = fn(x, stream, 0.4, seed), dropout(ones(5, 66), 0.4, seed) != 0
        assert out.dtype == stream.dtype
        torch.testing.assert_close(out[~kept], stream[~kept], rtol=0, atol=0)
        exact = torch.where(kept, x.float() / 0.6, 0) + stream.float()
        torch.testing.assert_close(out, exact.to(stream.dtype), rtol=torch.finfo(stream.dtype).eps, atol=1e-5)
        incoming = randn(5, 66).to(stream.dtype)
        leaves = x.clone().requires_grad_(), stream.clone().requires_grad_()
        both = torch.autograd.grad(fn(*leaves, 0.4, seed), leaves, incoming)
        torch.testing.assert_close(both[0], torch.where(kept, incoming.float() / 0.6, 0).bfloat16())
        torch.testing.assert_close(both[1], incoming, rtol=0, atol=0)
        for i, arguments in enumerate(((leaves[0], stream), (x, leaves[1]))):
            (alone,) = torch.autograd.grad(fn(*arguments, 0.4, seed), leaves[i], incoming)
            torch.testing.assert_close(alone, both[i], rtol=0, atol=0)


def test_backward_keeps_no_input(backend: str) -> None:
    """Nor a mask: of dropout it keeps the seed, of dropout_add an element for the dtype besides."""
    for name, least in (("dropout", 8), ("dropout_add", 12)):
        arguments = [randn(16, 16).requires_grad_() for _ in range(1 + (name == "dropout_add"))]
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
            of(name, backend)(*arguments, 0.1, seeded(1))
        assert sum(t.untyped_storage().nbytes() for t in kept) == least


def step(drop: Dropout, x: Tensor) -> Tensor:
    return drop(x * 2, 0.5, torch.randint(2**62, (), device=x.device)).square()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(drop: Dropout, reentrant: bool) -> None:
    """What is run again draws the same seed."""
    results: list[list[Tensor]] = []
    for run in (partial(step, drop), lambda x: checkpoint(partial(step, drop), x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x = randn(4, 50).requires_grad_()
        out = run(x)
        torch.rand(7)
        out.sum().backward()
        results.append([out, x.grad])  # type: ignore[list-item]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_compile(drop: Dropout) -> None:
    """A step that draws its seed is one graph, and draws another each time."""
    torch._dynamo.reset()
    run = torch.compile(partial(step, drop), fullgraph=True, backend="inductor" if torch.cuda.is_available() else "aot_eager")
    x = randn(4, 50).requires_grad_()
    torch.manual_seed(3)
    one, two = run(x), run(x)
    assert not torch.equal(one, two)
    (grad,) = torch.autograd.grad(two.sum(), x)
    torch.testing.assert_close(grad, 2 * two.detach() / torch.where(two != 0, x.detach(), 1))


def test_seeds_of_calls_that_are_replayed(drop: Dropout) -> None:
    """The seed is read at each call, p is not shared between them."""
    x = ones(4, 40)
    for turn in range(6):
        for p in (0.25, 0.75):
            torch.testing.assert_close(drop(x, p, seeded(turn)), dropout(x, p, seeded(turn)))


def test_first_values_are_not_built_in(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for a threshold, a factor or a stride of 0 or 1 is right for others."""
    fn = of("dropout", backend)
    for tunable in offline.tunables("dropout", backend).values():
        monkeypatch.setattr(tunable, "variants", {}, raising=False)
        tunable.forget()
    fn.kernels.forget()  # type: ignore[attr-defined]
    for x in (ones(6, 7).mT.contiguous().mT, ones(6, 9)[:, :7], ones(14, 3).mT):
        for p in (0.5, 0, 0.25, 0.75):
            torch.testing.assert_close(fn(x, p, seeded(1)), dropout(x, p, seeded(1)))


def test_bad_input(backend: str) -> None:
    x, seed = randn(3, 4), seeded(1)
    for name, residual in (("dropout", ()), ("dropout_add", (x,))):
        fn = partial(of(name, backend), x, *residual)
        for error, match, call in (
            (ValueError, r"p must be from 0 to 1, got -0.1", partial(fn, -0.1, seed)),
            (ValueError, r"p must be from 0 to 1, got 1.5", partial(fn, 1.5, seed)),
            (ValueError, r"p must be from 0 to 1, got nan", partial(fn, torch.nan, seed)),
            (TypeError, r"p must be a float, got '0.1'", partial(fn, "0.1", seed)),
            (TypeError, r"seed must be a tensor of int64, got int32", partial(fn, 0.1, seed.int())),
            (TypeError, r"seed must be a tensor of int64, got int", partial(fn, 0.1, 3)),
            (ValueError, r"seed must have one element, .* or \(1,\), got shape \(2,\)", partial(fn, 0.1, seed.expand(2))),
            (ValueError, r"seed must have one element, .* or \(1,\), got shape \(1, 1\)", partial(fn, 0.1, seed[None, None])),
        ):
            with pytest.raises(error, match=f"^{name}: {match}"):
                call()
    fn = of("dropout_add", backend)
    with pytest.raises(ValueError, match=r"^dropout_add: residual must have the shape \(3, 4\) of x, got \(4,\)"):
        fn(x, x[0], 0.1, seed)
    with pytest.raises(ValueError, match=r"^dropout_add: residual must be torch.float32, .*, got torch.float16"):
        fn(x, x.half(), 0.1, seed)


def test_wide_indices_in_triton() -> None:
    """An index past 2**32 in a small tensor, by steps that no tensor of its size has."""
    if torch.cuda.is_available():
        pytest.skip("test_past_two_to_the_32 has this")
    module = importlib.import_module("kernels_triton._dropout")
    config = importlib.import_module("kernels_triton.dropout").dropout_config
    x, steps = ones(2, 3, 5), [2**33, 2**31 + 7, 2**30 + 3]
    index = sum(torch.arange(n).view(-1, *[1] * (2 - d)) * steps[d] for d, n in enumerate(x.shape))
    for p in (0.3, 0.6):
        out = torch.empty_like(x)
        module.over_tiles(config, p, seeded(7), None, [out, None, x, None], steps)
        torch.testing.assert_close(out != 0, keep(index, p, seeded(7)))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [False, True])
def test_past_two_to_the_32(backend: str, strided: bool) -> None:
    x = torch.ones(2**17 + 2, 2**15, device="cuda", dtype=torch.bfloat16)
    x = (x.mT if strided else x).requires_grad_()
    out = of("dropout", backend)(x, 0.3, seeded(8))
    rows, width = x.shape
    for row in (0, rows // 2, rows - 1):
        expected = keep(torch.arange(row * width, (row + 1) * width, device="cuda"), 0.3, seeded(8))
        torch.testing.assert_close(out[row] != 0, expected)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(grad[-1], out[-1].detach(), rtol=0, atol=0)


@pytest.mark.gpu
def test_memory(backend: str) -> None:
    """Forward and backward allocate their results alone, and an element."""
    x, residual, seed = *(randn(2048, 4096, dtype=torch.bfloat16).requires_grad_() for _ in range(2)), seeded(4)

    def call(fn: Dropout, inputs: list[Tensor]) -> object:
        return torch.autograd.grad(fn(*inputs, 0.1, seed), inputs, x.detach())

    for fn, inputs in ((of("dropout", backend), [x]), (of("dropout_add", backend), [x, residual])):
        call(fn, inputs)
        assert _ops.peak(call, fn, inputs) <= (1 + len(inputs)) * x.nbytes + 512


def test_definitions_agree() -> None:
    x, residual = randn(7, 9), randn(7, 9)
    torch.testing.assert_close(dropout_add(x, residual, 0.2, seeded(1)), residual + dropout(x, 0.2, seeded(1)))

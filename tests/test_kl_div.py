"""KL divergence: PyTorch's own numbers for the definition, and what PyTorch and users' code get wrong."""

import itertools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

from bench import offline
from kernels_reference.kl_div import op

from . import _ops

INF, NAN = torch.inf, torch.nan


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(_ops.DEVICE, dtype)


def gradients(out: Tensor, *leaves: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
    weights = torch.linspace(1, 2, out.numel(), device=out.device).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), leaves, retain_graph=keep)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
def test_definition_is_as_torch(reduction: Any, log_target: bool) -> None:
    """With the same first size as divisor, in one dimension too; with a temperature, of its log-softmaxes."""
    for shape, temperature in itertools.product([(3, 5, 7), (4, 7), (7,)], [None, 2.0]):
        x, y = (randn(*shape, seed=seed).double().requires_grad_() for seed in (1, 2))
        if temperature is None:
            q, p = x.log_softmax(-1), y.log_softmax(-1) if log_target else y.softmax(-1)
            got = op.fn(q, p, reduction=reduction, log_target=log_target)
        else:
            q, p = (x / temperature).log_softmax(-1), (y / temperature).log_softmax(-1)
            got = op.fn(x, y, reduction=reduction, temperature=temperature)
        expected = F.kl_div(q, p, reduction=reduction, log_target=log_target or temperature is not None)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(gradients(got, x, y, keep=True), gradients(expected, x, y))


def test_known_values(backend: str) -> None:
    """Of Bernoulli distributions; where a target is 0, whatever the input, PyTorch has NaN."""
    kl_div = _ops.function(op, backend)
    log_q = torch.tensor([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0]], device=_ops.DEVICE).log().requires_grad_()
    p = torch.tensor([[0.25, 0.75], [0.75, 0.25], [1.0, 0.0]], device=_ops.DEVICE, requires_grad=True)
    out = kl_div(log_q, p, reduction="none")
    torch.testing.assert_close(out.sum(-1).cpu(), torch.tensor([0.130812, 0.0, 0.0]), rtol=1e-5, atol=1e-6)
    grad_q, grad_p = torch.autograd.grad(out.sum(), (log_q, p))
    torch.testing.assert_close(grad_q, -p.detach())
    expected = torch.tensor([[0.306853, 1.405465], [1.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(grad_p.cpu(), expected, rtol=1e-5, atol=1e-6)
    assert kl_div(log_q.detach().flip(1), p.detach(), reduction="none")[2, 0] == INF


def test_masked_vocabulary(backend: str) -> None:
    """What both never choose counts for nothing, as a token that is not there; what only one does is infinitely far."""
    x, y, labels = randn(3, 40, seed=1), randn(3, 40, seed=2), torch.tensor([1, 1, 0], device=_ops.DEVICE)
    x[0, 37:], y[:, 37:] = -INF, -INF
    options: dict[str, Any] = {"reduction": "batchmean", "temperature": 1.5, "ignore_index": 0}
    kl_div, leaves = _ops.function(op, backend), (x.clone().requires_grad_(), y.clone().requires_grad_())
    out = kl_div(*leaves, labels, **options)
    exact = x.double().requires_grad_(), y.double().requires_grad_()
    expected = op.fn(*exact, labels, **options)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    for got, right in zip(torch.autograd.grad(out, leaves), torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-7)
    first = torch.tensor([1, 0, 0], device=_ops.DEVICE)
    alone = op.fn(x[:1, :37].double(), y[:1, :37].double(), reduction="sum", temperature=1.5)
    torch.testing.assert_close(kl_div(*leaves, first, **options).double(), alone, rtol=1e-6, atol=1e-6)
    leaves[0].data[0, 3] = -INF
    assert kl_div(*leaves, first, **options) == INF


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_ignored_rows(backend: str, temperature: float | None) -> None:
    """They give nothing and get nothing, whatever they hold; where no row is left, only means have no value."""
    kl_div, x, y = _ops.function(op, backend), randn(4, 33, seed=1), randn(4, 33, seed=2)
    options: dict[str, Any] = {"temperature": temperature, "log_target": temperature is None, "ignore_index": 3}
    if temperature is None:
        x, y = x.log_softmax(-1), y.log_softmax(-1)
    labels, kept = torch.tensor([3, 0, -100, 3], device=_ops.DEVICE), slice(1, 3)
    x[0], y[3] = NAN, NAN
    x, y = x.requires_grad_(), y.requires_grad_()
    for reduction, by in (("batchmean", 2), ("mean", 2 * 33)):
        out = kl_div(x, y, labels, reduction=reduction, **options)
        expected = op.fn(x[kept].double(), y[kept].double(), reduction="sum", **options) / by
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
        right = torch.autograd.grad(expected, (x, y))
        for got, exact in zip(torch.autograd.grad(out, (x, y)), right, strict=True):
            assert got[::3].eq(0).all()
            torch.testing.assert_close(got[kept], exact[kept], rtol=1e-5, atol=1e-6)
    for reduction, value in (("batchmean", NAN), ("sum", 0.0)):
        out = kl_div(x, y, torch.full_like(labels, 3), reduction=reduction, **options)
        torch.testing.assert_close(out.item(), value, equal_nan=True)
        assert all(g.eq(0).all() for g in torch.autograd.grad(out, (x, y)))


def test_large_vocabulary_in_half_precision(backend: str) -> None:
    """A sum in float16 over 33001 terms would stick, and a result is rounded once."""
    x, y = randn(2, 33001, dtype=torch.float16, seed=1), randn(2, 33001, dtype=torch.float16, seed=2)
    exact = op.fn(x.double(), y.double(), reduction="batchmean", temperature=1.0)
    assert _ops.function(op, backend)(x, y, reduction="batchmean", temperature=1.0) == exact.half()


def test_teacher_of_another_dtype(backend: str) -> None:
    """Frozen; the gradient is the student's alone, in its dtype, and the loss of autocast is float32."""
    x, y = randn(3, 65, dtype=torch.bfloat16, seed=1).requires_grad_(), randn(3, 65, seed=2)
    with torch.autocast(_ops.DEVICE, torch.bfloat16):
        out = _ops.function(op, backend)(x, y, temperature=1.0)
    assert out.dtype == torch.float32
    exact = x.detach().double().requires_grad_()
    expected = op.fn(exact, y.double(), temperature=1.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    (grad,), (right,) = torch.autograd.grad(out, x), torch.autograd.grad(expected, exact)
    torch.testing.assert_close(grad, right.bfloat16())


def test_tiles_of_several_rows(backend: str) -> None:
    """As short rows take where there are many."""
    kl_div, (x, y) = _ops.function(op, backend), (randn(11, 9, seed=seed).requires_grad_() for seed in (1, 2))
    tunables = [t for name, t in offline.tunables("kl_div", backend).items() if "reduce" not in name]
    for tunable in tunables:
        tunable.watched = True
    kl_div.kernels.forget()  # type: ignore[attr-defined]
    kl_div(x, y, temperature=1.0).backward()
    for tunable in tunables:
        config = tunable.choose(offline.known_gpu(x.get_device()), *(tunable.asked or ()))
        fewer = {"block_sizes": [4, *config.get("block_sizes", ())[1:]], "BLOCK_M": 4}  # type: ignore[misc]
        tunable.force({name: fewer.get(name, value) for name, value in config.items()})
    kl_div.kernels.forget()  # type: ignore[attr-defined]
    try:
        _ops.check(op, backend, {"input": x.detach(), "target": y.detach(), "temperature": 1.0})
    finally:
        for tunable in tunables:
            tunable.watched = False
            tunable.force(None)
        kl_div.kernels.forget()  # type: ignore[attr-defined]


def test_layouts(backend: str) -> None:
    """(s, b, v) views of (b, s, v) tensors, each of the tensors in an own order: as the contiguous ones, and as compiled."""
    x, y = randn(2, 3, 130, seed=1)[..., :65].transpose(0, 1), randn(3, 2, 65, seed=2)
    kl_div, labels = _ops.function(op, backend), torch.tensor([[0, 1], [1, 1], [1, 0]], device=_ops.DEVICE)
    options: dict[str, Any] = {"reduction": "none", "log_target": True, "ignore_index": 0}
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kl_div, backend=counter, fullgraph=True)
    for n in (3, 2):
        alike = x[:n].contiguous().requires_grad_(), y[:n].clone().requires_grad_()
        right = kl_div(*alike, labels[:n], **options)
        right_grads = gradients(right, *alike)
        for fn in (kl_div, compiled):
            views = x[:n].detach().requires_grad_(), y[:n].detach().requires_grad_()
            got = fn(*views, labels[:n], **options)
            torch.testing.assert_close(got, right, rtol=0, atol=0)
            torch.testing.assert_close(gradients(got, *views), right_grads, rtol=0, atol=0)
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_logits(backend: str, offset: float) -> None:
    """Which rests on products that are not rounded before they are added to, as Triton's interpreter does round them."""
    x, y = randn(4, 5000, seed=1), randn(4, 5000, seed=2)
    _ops.check(op, backend, {"input": x + offset, "target": y, "temperature": 1.0, "reduction": "batchmean"})


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits(backend: str) -> None:
    x, y = (torch.randn(16800, 128256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    labels = torch.zeros(16800, dtype=torch.int64, device="cuda")
    labels[-8:] = 1
    options: dict[str, Any] = {"reduction": "batchmean", "temperature": 1.0, "dtype": torch.float32}
    x.requires_grad_()
    last = x.detach()[-8:].clone().requires_grad_()
    loss = _ops.function(op, backend)(x, y, labels, ignore_index=0, **options)
    right = _ops.function(op, backend)(last, y[-8:], **options)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0][-8:], torch.autograd.grad(right, last)[0])


def test_bad_input(backend: str) -> None:
    good: dict[str, Any] = {"input": randn(2, 3), "target": randn(2, 3)}
    for changed, message in (
        ({"input": randn(2, 0)}, r"input must have one class or more, got shape \(2, 0\)"),
        ({"input": randn()}, r"input must have one class or more, got shape \(\)"),
        ({"target": randn(3)}, r"target must have the shape of input, \(2, 3\), got \(3,\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels must have the shape \(2,\) of the rows, got \(3,\)"),
        ({"temperature": 0.0}, "temperature must be more than 0 and finite, or None, got 0.0"),
        ({"temperature": NAN}, "temperature must be more than 0 and finite, or None, got nan"),
        ({"temperature": 1.0, "log_target": True}, "log_target must be False where temperature, 1.0, is given, got True"),
        ({"dtype": torch.int64}, "dtype must be float32, float16, bfloat16 or None, got torch.int64"),
        ({"reduction": "max"}, "reduction must be 'mean' or 'batchmean' or 'sum' or 'none', got 'max'"),
    ):
        moved = {n: v.to(_ops.DEVICE) if isinstance(v, Tensor) else v for n, v in changed.items()}
        with pytest.raises(ValueError, match=f"kl_div: {message}"):
            _ops.function(op, backend)(**{**good, **moved})

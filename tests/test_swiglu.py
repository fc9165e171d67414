"""SwiGLU: its packed layouts, the formulas that models publish, and what users of such kernels reported."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_reference._glu import split
from kernels_reference.swiglu import op

from . import _ops

layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def swiglu(backend: str) -> Any:
    return _ops.function(op, backend)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(_ops.DEVICE, dtype)


def test_known_values(backend: str) -> None:
    inf, nan = torch.inf, torch.nan
    gate = torch.tensor([0.0, 1.0, -1.0, 3.0, -100.0, 100.0, inf, -inf, nan, 1.0], device=_ops.DEVICE)
    up = torch.tensor([5.0, 3.0, 3.0, -2.0, 7.0, 7.0, 2.0, 2.0, 2.0, -inf], device=_ops.DEVICE)
    expected = torch.tensor([0.0, 2.1931758, -0.8068242, -5.7154446, 0.0, 700.0, inf, nan, nan, -inf], device=_ops.DEVICE)
    torch.testing.assert_close(swiglu(backend)(gate, up), expected, equal_nan=True)


def test_published_formulas(backend: str) -> None:
    """Llama, Mistral and Qwen in transformers; `SiluAndMul` in vLLM; how gpt-oss takes gate and up apart."""
    gate, up, packed = randn(5, 96), randn(5, 96), randn(5, 192)
    torch.testing.assert_close(swiglu(backend)(gate, up), F.silu(gate) * up)
    torch.testing.assert_close(swiglu(backend)(packed), F.silu(packed[..., :96]) * packed[..., 96:])
    torch.testing.assert_close(swiglu(backend)(packed, interleaved=True), F.silu(packed[..., ::2]) * packed[..., 1::2])


def test_gpt_oss(backend: str) -> None:
    """As `GptOssExperts` in transformers and `swiglu` in OpenAI's own code have it, with many elements beyond the limit."""
    x = (randn(6, 80) * 8).requires_grad_()
    gate, up = x[..., ::2].clamp(min=None, max=7.0), x[..., 1::2].clamp(min=-7.0, max=7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    got = swiglu(backend)(x, interleaved=True, alpha=1.702, limit=7.0, offset=1.0)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, randn(6, 40))[0] for y in (got, expected)))


def test_limit_is_clamp(backend: str) -> None:
    """At the limit, beyond it, infinite and NaN, in output and gradient."""
    edges = [1.0, -1.0, 7.0, -7.0, 7.0000005, -7.0000005, 100.0, -100.0, torch.inf, torch.nan]
    gate = torch.tensor(edges, device=_ops.DEVICE).repeat(11).requires_grad_()
    up = torch.tensor([*edges, -torch.inf], device=_ops.DEVICE).repeat(10).requires_grad_()
    got, expected = swiglu(backend)(gate, up, limit=7), F.silu(gate.double().clamp(max=7)) * up.double().clamp(-7, 7)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    got, expected = (torch.autograd.grad(y.sum(), (gate, up)) for y in (got, expected))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("option", [{"alpha": 2.0}, {"limit": 0.5}, {"offset": 1.0}], ids=str)
def test_each_option_alone(backend: str, option: dict[str, Any]) -> None:
    """And that a call with an option leaves the next one, without, as it was."""
    x = randn(5, 48).requires_grad_()
    for options in (option, dict[str, Any]()):
        got, expected = swiglu(backend)(x, **options), op.fn(x, **options)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, expected)))


@layouts
@pytest.mark.parametrize("width", [1, 7, 160])
def test_packed_is_separate(backend: str, interleaved: bool, width: int) -> None:
    """Output and gradient, of a packed tensor and of one that is a view with gaps."""
    for packed in (randn(4, 9, 2 * width), randn(4, 9, 6 * width)[..., : 2 * width]):
        packed.requires_grad_()
        halves = [half.contiguous() for half in split(packed, None, interleaved)]
        got, expected = swiglu(backend)(packed, interleaved=interleaved), swiglu(backend)(*halves)
        torch.testing.assert_close(got, expected)
        incoming = randn(4, 9, width)
        torch.testing.assert_close(*(torch.autograd.grad(y, packed, incoming)[0] for y in (got, expected)))


def test_chunk_halves_are_not_copied(backend: str) -> None:
    packed = randn(2, 30, 128).requires_grad_()
    gate, up = packed.chunk(2, -1)
    flat = swiglu(backend).kernels.rows.flatten([gate, up, False])[0][:2]
    assert [t.data_ptr() for t in flat] == [gate.data_ptr(), up.data_ptr()]
    assert [t.stride() for t in flat] == [(128, 1), (128, 1)]
    got = torch.autograd.grad(swiglu(backend)(gate, up).sum(), packed)
    torch.testing.assert_close(got, torch.autograd.grad((F.silu(gate) * up).sum(), packed))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_memory(backend: str, packed: bool) -> None:
    """Forward and backward allocate their results alone."""
    whole, incoming = randn(4096, 4096, dtype=torch.bfloat16), randn(4096, 2048, dtype=torch.bfloat16)
    arguments = [t.requires_grad_() for t in ([whole] if packed else whole.chunk(2, -1))]

    def call() -> Any:
        return torch.autograd.grad(swiglu(backend)(*arguments), arguments, incoming)

    call()
    assert _ops.peak(call) == incoming.nbytes + whole.nbytes


def test_incoming_gradient(backend: str) -> None:
    """Of any strides, never written to, and good for a second use of the graph."""
    gate, up = randn(3, 8, 40).requires_grad_(), randn(3, 8, 40).requires_grad_()
    incoming = randn(3, 40, 8).transpose(1, 2)
    kept = incoming.clone()
    out = swiglu(backend)(gate, up)
    once, again = (torch.autograd.grad(out, (gate, up), incoming, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(once, torch.autograd.grad(F.silu(gate) * up, (gate, up), incoming))
    torch.testing.assert_close([*again, incoming], [*once, kept], rtol=0, atol=0)


def test_gate_is_up(backend: str) -> None:
    """Also before and after two tensors of the same shape: kernels must not remember that they were one."""
    x, y = randn(6, 50).requires_grad_(), (randn(6, 50) + 1).requires_grad_()
    for other in (x, y, x):
        out, expected = swiglu(backend)(x, other), F.silu(x) * other
        torch.testing.assert_close(out, expected)
        inputs = [x] if other is x else [x, other]
        torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


def test_only_needed_gradients_are_made(backend: str) -> None:
    gate, up, incoming = randn(3, 40), randn(3, 40), randn(3, 40)
    both = swiglu(backend).kernels.backward(incoming, gate, up, False, 1.0, None, 0.0, [True, True])
    for needs in ([True, False], [False, True]):
        got = swiglu(backend).kernels.backward(incoming, gate, up, False, 1.0, None, 0.0, needs)
        assert [g is not None for g in got] == needs
        torch.testing.assert_close(got[needs.index(True)], both[needs.index(True)])


def test_bad_input(backend: str) -> None:
    fn, x = swiglu(backend), randn(3, 4)
    for error, match, call in (
        (ValueError, r"gate must have one dimension or more, got a scalar", lambda: fn(x[0, 0], x[0, 0])),
        (ValueError, r"gate must have an even last dimension .*, got shape \(3, 3\)", lambda: fn(x[:, 1:])),
        (ValueError, r"interleaved must be False where up is given, got True", lambda: fn(x, x, interleaved=True)),
        (TypeError, r"up must have the dtype of gate, torch.float32, got torch.float16", lambda: fn(x, x.half())),
        (ValueError, r"up must have the shape of gate, \(3, 4\), got \(1, 4\)", lambda: fn(x, x[:1])),
        (ValueError, r"limit must be more than 0 or None, got 0", lambda: fn(x, x, limit=0)),
        (ValueError, r"limit must be more than 0 or None, got nan", lambda: fn(x, x, limit=torch.nan)),
        (ValueError, r"alpha must be finite, got inf", lambda: fn(x, x, alpha=torch.inf)),
        (ValueError, r"offset must be finite, got nan", lambda: fn(x, x, offset=torch.nan)),
        (TypeError, r"limit must be a float or None, got '7'", lambda: fn(x, x, limit="7")),
    ):
        with pytest.raises(error, match=f"^swiglu: {match}"):
            call()


@pytest.mark.gpu
@layouts
def test_packed_past_two_to_the_31(backend: str, interleaved: bool) -> None:
    packed = torch.randn(131073, 2 * 8192, device="cuda", dtype=torch.bfloat16).requires_grad_()
    last = packed.detach()[-3:].clone().requires_grad_()
    out, expected = (swiglu(backend)(t, interleaved=interleaved) for t in (packed, last))
    torch.testing.assert_close(out[-3:], expected, rtol=0, atol=0)
    got, expected = (torch.autograd.grad(y, t, torch.ones_like(y))[0] for y, t in ((out, packed), (expected, last)))
    torch.testing.assert_close(got[-3:], expected, rtol=0, atol=0)

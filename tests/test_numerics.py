"""Each op, in each kernel package, against its definition in float64 on the same rounded inputs."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_reference._op import Op

from . import _ops


def test_samples(op: Op[Any], sample: int, backend: str, dtype: torch.dtype) -> None:
    _ops.check(op, backend, _ops.sample(op, sample, dtype))


CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


def relayout(draw: Callable[..., Any], t: Tensor) -> Tensor:
    """The same values under other strides: permuted, stepped, offset and so misaligned, or expanded."""
    kind = draw(st.sampled_from(["contiguous", "permuted", "stepped", "offset", "expanded"]))
    if kind == "permuted" and t.ndim > 1:
        order = draw(st.permutations(range(t.ndim)))
        inverse = [order.index(d) for d in range(t.ndim)]
        return t.permute(*order).contiguous().permute(*inverse)
    if kind == "stepped" and t.ndim:
        d = draw(st.integers(0, t.ndim - 1))
        return t.repeat_interleave(2, d).unflatten(d, (t.shape[d], 2)).select(d + 1, 1)
    if kind == "offset" and t.ndim:
        return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
    if kind == "expanded" and t.ndim > 1:
        d = draw(st.integers(0, t.ndim - 2))
        return t.narrow(d, 0, 1).expand(t.shape)
    return t


@settings(
    max_examples=60 if torch.cuda.is_available() else 24,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=CHECKS,
)
@given(data=st.data())
def test_any_layout(data: st.DataObject) -> None:
    """Any sample of any op, with each tensor in any layout, in any dtype."""
    op = _ops.load(data.draw(st.sampled_from(_ops.NAMES)))
    arguments = _ops.sample(
        op, data.draw(st.integers(0, _ops.sample_count(op.name) - 1)), data.draw(st.sampled_from(_ops.DTYPES))
    )
    laid_out = {n: relayout(data.draw, v) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    _ops.check(op, data.draw(st.sampled_from(_ops.BACKENDS)), laid_out, data.draw(st.integers(0, 99)))

"""How far a result may be from the oracle: the definition in float64 on the same rounded inputs.

The error of an op may be at most 1.5 times the error of its eager baseline in the same dtype on the same inputs, or two
roundings of the result's dtype where that is more. In float32 eight, since each step in between is rounded as coarsely as
the result. Both hold for the norm and for the worst element.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._draw import Draw
from ._op import Op


class Error(NamedTuple):
    """Errors relative to the oracle; one element counts relative to itself and to the root mean square of all."""

    norm: float
    worst: float


class Oracle:
    """The right outputs and gradients for some arguments and random incoming gradients."""

    def __init__(self, op: Op[Any], arguments: Mapping[str, Any], seed: int = 1) -> None:
        arguments = dict(zip(op.arguments.names, op.arguments.bind((), arguments), strict=True))
        self.op, self.arguments = op, arguments
        exact = leaves(op, arguments, torch.float64)
        results = outputs(op.fn(**exact))
        lead = next(v for v in arguments.values() if isinstance(v, Tensor))
        draw = Draw(lead.device, torch.float32, seed)
        # Rounded to the coarsest dtype, so that every implementation is given the same.
        coarse = [t.dtype for t in arguments.values() if isinstance(t, Tensor) and t.is_floating_point()]
        self.incoming = [draw(*r.shape).to(min(coarse, key=lambda d: d.itemsize)).double() for r in results]
        self.results, self.grads = _differentiate(exact, results, self.incoming)

    def errors(self, fn: Callable[..., Any]) -> dict[str, Error]:
        """The errors of an implementation's outputs and gradients; infinite where shapes, NaN or infinities differ."""
        mine = leaves(self.op, self.arguments)
        results, grads = _differentiate(mine, outputs(fn(**mine)), self.incoming)
        names = self.op.returned(self.arguments)
        pairs = {name: (r, e) for name, r, e in zip(names, results, self.results, strict=True)}
        pairs |= {f"gradient of {name}": (grads[name], exact) for name, exact in self.grads.items()}
        return {name: error(got, exact) for name, (got, exact) in pairs.items()}

    @functools.cached_property
    def allowed(self) -> dict[str, Error]:
        """What the principle allows, by the eager baseline's errors."""
        eager = self.errors(self.op.eager or self.op.fn)
        dtypes = self._dtypes(eager)
        return {name: Error(*(max(1.5 * e, self._roundings(dtypes[name])) for e in eager[name])) for name in eager}

    def share(self, errors: Mapping[str, Error]) -> float:
        """The largest of the errors as a share of what is allowed."""
        return max(e / a for name, pair in errors.items() for e, a in zip(pair, self.allowed[name], strict=True))

    def refuse(self, fn: Callable[..., Any]) -> None:
        """Raises if an error is more than the principle allows."""
        for name, found in self.errors(fn).items():
            if not all(e <= a for e, a in zip(found, self.allowed[name], strict=True)):
                raise AssertionError(f"{self.op.name}: {name} has {found}, allowed is {self.allowed[name]}")

    def _dtypes(self, names: Mapping[str, Any]) -> dict[str, torch.dtype]:
        with torch.no_grad():
            made = dict(
                zip(self.op.returned(self.arguments), outputs((self.op.eager or self.op.fn)(**self.arguments)), strict=True)
            )
        return {n: (made[n] if n in made else self.arguments[n.removeprefix("gradient of ")]).dtype for n in names}

    def _roundings(self, dtype: torch.dtype) -> float:
        return self.op.slack.get(dtype, 8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps / 2


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def leaves(op: Op[Any], arguments: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The arguments with fresh leaves: differentiable ones ask for gradients; all floats in `dtype` if it is given."""
    fresh = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().to(dtype or value.dtype)
            fresh[name] = value.requires_grad_() if name in op.grads else value
        elif isinstance(value, torch.dtype):
            fresh[name] = dtype or value
    return fresh


def error(result: Tensor, exact: Tensor) -> Error:
    finite = exact.isfinite()
    if result.shape != exact.shape or not torch.equal(result.isfinite(), finite):
        return Error(torch.inf, torch.inf)
    if not finite.all():
        if not torch.equal(result[~finite].double().nan_to_num(0.5), exact[~finite].nan_to_num(0.5)):
            return Error(torch.inf, torch.inf)
        result, exact = result[finite], exact[finite]
    if not exact.numel():
        return Error(0.0, 0.0)
    difference, scale = (result.double() - exact).abs_(), exact.square().mean().sqrt()
    if scale == 0:
        return Error(difference.max().item(), difference.max().item())
    norm = (difference.norm() / exact.norm()).item()
    return Error(norm, difference.div_(exact.abs() + scale).max().item())


def _differentiate(
    arguments: Mapping[str, Any], results: tuple[Tensor, ...], incoming: list[Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    wanted = {n: v for n, v in arguments.items() if isinstance(v, Tensor) and v.requires_grad}
    live = [(r, g.to(r.dtype)) for r, g in zip(results, incoming, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in live], list(wanted.values()), [g for _, g in live]) if live else ()
    return tuple(r.detach() for r in results), dict(zip(wanted, found, strict=True)) if live else {}

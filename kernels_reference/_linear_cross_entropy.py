"""The host's side of linear_cross_entropy: which part of the logits is made when. Products are PyTorch's, so cuBLAS's."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Maybe = Tensor | None
AT_A_TIME = 1 << 25
"""Logits that are made by one product."""


class Backend(NamedTuple):
    """The kernels."""

    losses: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """The forward of cross_entropy."""
    turn: Callable[..., None]
    """Writes the gradient of some columns of logits, here in their place: `write_grad` of cross_entropy."""
    scale: Callable[[Tensor, Tensor, Tensor], None]
    """Writes the product of a tensor and a number, which may lie in the tensor's place: then nothing is done for 1."""


class Options(NamedTuple):
    """Those of the op, in its order."""

    weight: Maybe
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    dtype: torch.dtype | None
    return_lse: bool
    extra_memory: float

    def ahead(self, need: bool) -> bool:
        """Whether a gradient that is needed is made by the forward: as long as only one number can be asked for."""
        return need and self.reduction != "none" and not self.return_lse

    def magnified(self, rows: int, dtype: torch.dtype) -> float:
        """What float16 gradients are multiplied by in between: those of a mean would be too small."""
        return max(1 << rows.bit_length() >> 4, 1) if dtype == torch.float16 and self.reduction == "mean" else 1

    def rows(self, target: Tensor, V: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows count, their weights, and what losses and z-losses are divided by."""
        counts, known = target != self.ignore_index, (target >= 0) & (target < V)
        at = torch.where(known, target, 0).long()
        w = torch.where(known, 1.0 if self.weight is None else self.weight.index_select(0, at).float(), torch.nan)
        w = torch.where(counts, w, 0.0)
        mean = self.reduction == "mean"
        return counts, w, torch.stack([w.sum(), counts.sum()]) if mean else torch.ones(2, device=target.device)

    def given(self, target: Tensor, lse: Tensor, total: Tensor) -> tuple[Any, ...]:
        """What a kernel takes to turn logits into their gradient."""
        return target, self.weight, lse, total, self.ignore_index, self.label_smoothing, self.z_loss, self.softcap


def part(t: Tensor, of: slice) -> Tensor:
    """`t[of]`, also of a tensor that stands for one on a GPU that is not here."""
    return t.narrow(0, of.start, of.stop - of.start)


def multiply(a: Tensor, b: Tensor, out: Tensor, bias: Maybe = None) -> None:
    torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a product to a float32 total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


class Head:
    """A linear layer, its input, and its logits of some classes after the other."""

    def __init__(self, backend: Backend, input: Tensor, linear_weight: Tensor, linear_bias: Maybe) -> None:
        self.backend, self.input, self.weight, self.bias = backend, input, linear_weight, linear_bias
        (N, self.width), V = input.shape, linear_weight.shape[0]
        step = min(max(AT_A_TIME // N // 256 * 256, 256), V)
        self.blocks = [slice(first, min(first + step, V)) for first in range(0, V, step)]

    def logits(self, classes: slice, to: Tensor) -> Tensor:
        logits = to.narrow(0, 0, self.input.shape[0] * (classes.stop - classes.start)).view(self.input.shape[0], -1)
        bias = None if self.bias is None else part(self.bias, classes)
        multiply(self.input, part(self.weight, classes).t(), logits, bias)
        return logits

    def places(self, grad_weight: Tensor, extra_memory: float) -> list[Maybe]:
        """Where the logits of each block are kept until they are turned; None where there is no place.

        The gradient of the weight is written block by block: until then, its memory holds logits. Those of a block lie behind
        all that is written before them. Then extra memory is used up.
        """
        N, room = self.input.shape[0], grad_weight.view(-1) if grad_weight.is_contiguous() else grad_weight.new_empty(0)
        extra = grad_weight.new_empty(min(int(extra_memory * grad_weight.numel()), N * self.weight.shape[0]))
        found: list[Maybe] = []
        at = self.blocks[0].stop * self.width
        for classes in self.blocks:
            n = classes.stop - classes.start
            if room is not extra and at + n * N > room.numel():
                room, at = extra, 0
            found.append(room.narrow(0, at, n * N) if at + n * N <= room.numel() else None)
            at += n * (max(N, self.width) if room is not extra else N)
        return found

    def by_rows(
        self, target: Tensor, options: Options, total: Tensor, grad_out: Tensor, made_input: Maybe, on_bias: Maybe
    ) -> tuple[Tensor, Tensor]:
        """The loss and lse of each row; all logits of some rows after the other, which give whole gradients of the input."""
        (N, _), V = self.input.shape, self.weight.shape[0]
        step = min(max(4 * AT_A_TIME // V // 64 * 64, 64), N)
        buffer = self.input.new_empty(step, V)
        found: list[tuple[Tensor, Tensor]] = []
        for rows in (slice(first, min(first + step, N)) for first in range(0, N, step)):
            logits = buffer.narrow(0, 0, rows.stop - rows.start)
            multiply(part(self.input, rows), self.weight.t(), logits, self.bias)
            some = options.weight, options.ignore_index, "none", options.label_smoothing, 0.0, options.softcap, torch.float32
            loss, lse, _ = self.backend.losses(logits, part(target, rows), *some, options.return_lse)
            found.append((loss, lse))
            if made_input is not None or on_bias is not None:
                self.backend.turn(grad_out, None, logits, *options.given(part(target, rows), lse, total), 0, V, logits)
            if made_input is not None:
                multiply(logits, self.weight, part(made_input, rows))
            if on_bias is not None:
                on_bias += logits.sum(0, dtype=torch.float32)
        return torch.cat([loss for loss, _ in found]), torch.cat([lse for _, lse in found])

    def by_classes(
        self, places: Sequence[Maybe], scratch: Tensor, target: Tensor, options: Options, counts: Tensor, w: Tensor
    ) -> tuple[list[Maybe], Tensor, Tensor]:
        """The logits that are kept, the loss and lse of each row; logits of some classes after the other."""
        kept: list[Maybe] = []
        lses: list[Tensor] = []
        at_target, smooth = (self.input.new_zeros(target.shape, dtype=torch.float32) for _ in range(2))
        for classes, place in zip(self.blocks, places, strict=True):
            logits = self.logits(classes, scratch if place is None else place)
            kept.append(None if place is None else logits)
            inside = (target >= classes.start) & (target < classes.stop)
            common = -1, "none", 0.0, 0.0, options.softcap, torch.float32, True
            loss, lse, _ = self.backend.losses(logits, torch.where(inside, target - classes.start, -1), None, *common)
            at_target += torch.where(inside, torch.where(lse == -torch.inf, lse, lse - loss), 0.0)
            if options.label_smoothing:
                weight = None if options.weight is None else part(options.weight, classes)
                some = classes.stop - classes.start if weight is None else weight.sum(dtype=torch.float32)
                rest = -1, "none", 1.0, *common[3:]
                loss, *_ = self.backend.losses(logits, torch.zeros_like(target), weight, *rest)
                smooth += some * lse - (classes.stop - classes.start) * loss
            lses.append(lse)
        lse, s, V = torch.stack(lses).logsumexp(0), options.label_smoothing, self.weight.shape[0]
        loss = w * (lse - at_target)
        if s:
            weights = V if options.weight is None else options.weight.sum(dtype=torch.float32)
            loss = (1 - s) * loss + s / V * (weights * lse - smooth)
        return kept, torch.where(counts, loss, 0.0), lse

    def backward(
        self, kept: Sequence[Maybe], scratch: Tensor, grads: Sequence[Maybe], grad_out: Tensor, grad_lse: Maybe, given: Any
    ) -> Maybe:
        """Writes the gradients of weight and bias, where there are such; that of the input in float32, if it is needed."""
        on_input, grad_weight, grad_bias = grads
        for classes, logits in zip(self.blocks, kept, strict=True):
            logits = self.logits(classes, scratch) if logits is None else logits
            self.backend.turn(grad_out, grad_lse, logits, *given, classes.start, self.weight.shape[0], logits)
            if on_input is not None:
                add_product(on_input, logits, part(self.weight, classes))
            if grad_bias is not None:
                part(grad_bias, classes).copy_(logits.sum(0, dtype=torch.float32))
            if grad_weight is not None:
                multiply(logits.t(), self.input, part(grad_weight, classes))
        return on_input

    def scratch(self) -> Tensor:
        return self.input.new_empty(self.input.shape[0] * self.blocks[0].stop)


def host(backend: Backend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of a package."""

    def linear_cross_entropy_fwd(
        input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Maybe, weight: Maybe, ignore_index: int,
        reduction: str, label_smoothing: float, z_loss: float, softcap: float | None, dtype: torch.dtype | None,
        return_lse: bool, extra_memory: float, needs: Sequence[bool],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        numbers = ignore_index, reduction, label_smoothing, z_loss, softcap, dtype, return_lse, extra_memory
        options, V = Options(weight, *numbers), linear_weight.shape[0]
        makes_input, makes_weight, makes_bias = (options.ahead(need) for need in needs)
        head = Head(backend, input, linear_weight, linear_bias)
        made_input, made_weight = (
            torch.empty_like(t) if make else t.new_empty(0) for t, make in ((input, makes_input), (linear_weight, makes_weight))
        )
        made_bias = input.new_zeros(V if makes_bias else 0, dtype=torch.float32)
        counts, w, total = options.rows(target, V)
        grad_out = torch.full((), options.magnified(input.shape[0], input.dtype), dtype=torch.float32, device=input.device)
        if makes_weight:
            places = head.places(made_weight, extra_memory)
            scratch = head.scratch() if any(place is None for place in places) else input.new_empty(0)
            kept, loss, lse = head.by_classes(places, scratch, target, options, counts, w)
            on_input = input.new_zeros(input.shape, dtype=torch.float32) if makes_input else None
            grads = on_input, made_weight, made_bias if makes_bias else None
            head.backward(kept, scratch, grads, grad_out, None, options.given(target, lse, total))
            if on_input is not None:
                made_input.copy_(on_input)
        else:
            wanted = made_input if makes_input else None, made_bias if makes_bias else None
            loss, lse = head.by_rows(target, options, total, grad_out, *wanted)
        out = loss if reduction == "none" else loss.sum() / total.select(0, 0)
        if z_loss:
            parts = torch.where(counts, z_loss * lse.square(), 0.0)
            out = out + (parts if reduction == "none" else parts.sum() / total.select(0, 1))
        return out.to(dtype or input.dtype), lse, total, made_input, made_weight, made_bias.to(input.dtype)

    def linear_cross_entropy_bwd(
        grad_out: Tensor, grad_lse: Maybe, input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Maybe,
        weight: Maybe, lse: Tensor, total: Tensor, made_input: Tensor, made_weight: Tensor, made_bias: Tensor,
        ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None, return_lse: bool,
        needs: Sequence[bool], last: bool,
    ) -> tuple[Maybe, ...]:  # fmt: skip
        options = Options(weight, ignore_index, reduction, label_smoothing, z_loss, softcap, None, return_lse, 0.0)
        if options.ahead(True):
            factor = grad_out.float() / options.magnified(input.shape[0], input.dtype)
            grads: list[Maybe] = []
            for made, need in zip((made_input, made_weight, made_bias), needs, strict=True):
                grads.append(None if not need else made if last else torch.empty_like(made))
                if need:
                    backend.scale(made, factor, grads[-1])  # type: ignore[arg-type]
            return tuple(grads)
        head = Head(backend, input, linear_weight, linear_bias)
        on_input = input.new_zeros(input.shape, dtype=torch.float32) if needs[0] else None
        grad_weight = torch.empty_like(linear_weight) if needs[1] else None
        grad_bias = input.new_empty(linear_weight.shape[0]) if needs[2] else None
        given = options.given(target, lse, total)
        kept, grads = [None] * len(head.blocks), [on_input, grad_weight, grad_bias]
        head.backward(kept, head.scratch(), grads, grad_out, grad_lse, given)
        return None if on_input is None else torch.empty_like(input).copy_(on_input), grad_weight, grad_bias

    return linear_cross_entropy_fwd, linear_cross_entropy_bwd

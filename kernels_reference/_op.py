"""The contract: what an op declares, and how a backend's kernels become its public function.

A declaration (`Op`) holds the definition of an op and all that tests and benchmarks need. `Op.implement` takes the
kernels of one backend and returns the function that users call. It has two doors into one room. A plain eager call goes
straight to the kernels, because a registered operator costs more host time than a small kernel runs. `torch.compile`,
tensor subclasses, dispatch modes and function transforms go through operators registered with `torch.library`. Both doors
refuse the same input, save the same values and run the same code.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ._arguments import Arguments
from ._draw import Draw
from ._replay import PLAIN, Replay, Replays, is_here, layout, recording
from ._rows import Rows

F = TypeVar("F", bound=Callable[..., Any])
Make = Callable[..., Tensor]

INTERPRET = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


class Cost(NamedTuple):
    """The least that one direction of an op can do: bytes to and from device memory, floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True)
class Op(Generic[F]):
    """One op.

    A forward kernel takes the definition's arguments in their order and returns the outputs, then the extras. A backward
    says by its parameters' names what it is given, and so what is saved: `grad_<output>`, any argument, output or extra,
    and `needs`, one bool for each entry of `grads`. It returns one gradient for each entry, None where none is needed.
    A forward that names `needs` is told which gradients will be asked for, and may make them ahead, as extras. A backward
    that names `last` is told whether nobody will ask again, so that it may write to extras and return them.
    """

    fn: F
    """The definition in plain PyTorch, in its inputs' dtype: the oracle. Every backend has its signature and docstring."""
    check: Callable[..., None]
    """Refuses shapes, ranges and combinations. Types, literal options, dtypes and devices are refused before it."""
    samples: Callable[[Draw], Iterator[dict[str, Any]]]
    """Arguments for tests: small, odd, each option at least once."""
    workloads: Mapping[str, Callable[[Draw], dict[str, Any]]]
    """Arguments for benchmarks, under the names of the real models whose shapes they are."""
    cost: Callable[..., tuple[Cost, Cost]]
    """The cost of a forward and of a backward with these arguments."""
    outputs: Mapping[str, Make]
    """Each output's name, and an empty tensor like it from a kernel's arguments. Where the signature has an option
    `return_x`, the output `x` is returned on request only."""
    extras: Mapping[str, Make] = field(default_factory=dict)
    """The same for what the forward computes for the backward alone."""
    grads: Mapping[str, str] = field(default_factory=dict)
    """Each differentiable argument, and the parameter of the backward that its gradient looks like (`empty_like`)."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Differentiable arguments whose gradient is that of another: where both have one dtype, the backward makes it once."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """A row-wise op's tensors, the main one first, and how many trailing dimensions each keeps: kernels see all leading
    ones as one. They reduce the last dimension; an argument `dim` never reaches them."""
    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    """What a tensor argument takes, where that is not float32, float16 and bfloat16."""
    eager: Callable[..., Any] | None = None
    """What a user would write today: the baseline, where it is not the definition."""
    autocast: Callable[..., Mapping[str, Any]] | None = None
    """The arguments that change under autocast, where the native op has a rule."""
    library: Sequence[str] = ()
    """Of "forward" and "backward", what calls PyTorch's own kernels, such as a sort; it is not replayed."""
    slack: Mapping[torch.dtype, float] = field(default_factory=dict)
    """Exceptions to the tolerance of two roundings, in roundings of a dtype; each has its reason in a comment."""

    @property
    def name(self) -> str:
        return self.fn.__name__

    @functools.cached_property
    def arguments(self) -> Arguments:
        return Arguments(self.fn, self.dtypes)

    def returned(self, options: Mapping[str, Any]) -> list[str]:
        """The names of the outputs that a call with these arguments returns."""
        return [name for name in self.outputs if options.get(f"return_{name}", True)]

    def implement(
        self, forward: Callable[..., Any], backward: Callable[..., Any] | None = None, *, module: str | None = None
    ) -> F:
        """The public function that runs these kernels, of a module, by default the forward's."""
        module = module or forward.__module__
        arguments, kernels = self.arguments, _Kernels(self, forward, backward, module)
        dim_at = arguments.position.get("dim", -1) if self.rows else -1

        def refuse(values: list[Any]) -> None:
            arguments.refuse(values)
            tensors = [value for value in values if isinstance(value, Tensor)]
            for t in tensors:
                if t.device != tensors[0].device:
                    self._refuse_devices(tensors[0], t, values)
            if not (tensors[0].is_cuda or INTERPRET):
                raise ValueError(
                    f"{self.name}: {arguments.names[0]} must be on a GPU, got {tensors[0].device}. To run without one, set "
                    "TRITON_INTERPRET=1 before the import: the kernels then run, slowly, under Triton's interpreter"
                )
            self.check(*values)

        def perform(values: list[Any]) -> Any:
            tensors = [value for value in values if isinstance(value, Tensor)]
            if self.autocast is not None and torch.is_autocast_enabled(tensors[0].device.type):
                for name, value in self.autocast(*values).items():
                    values[arguments.position[name]] = value
            if any(t.numel() == 0 for t in tensors):
                return self.fn(**dict(zip(arguments.names, values, strict=True)))
            if dim_at < 0:
                return kernels(values)
            dim = values.pop(dim_at)
            if dim in (-1, values[0].ndim - 1):
                return kernels(values)
            values[0] = values[0].movedim(dim, -1)
            return kernels(values).movedim(-1, dim)

        replays = Replays(lambda *values: perform(list(values)), records="forward" not in self.library)
        kernels.replays.append(replays)

        @functools.wraps(self.fn)
        def public(*args: Any, **kwargs: Any) -> Any:
            if _watched():
                values = arguments.bind(args, kwargs)
                refuse(values)
                return perform(values)
            key, tensors = layout((*args, *kwargs.values()))
            autocast = False
            if key is not None and tensors:
                autocast = self.autocast is not None and torch.is_autocast_enabled(tensors[0].device.type)
                key = (torch.is_grad_enabled(), autocast, *kwargs, *key)
            call = replays.find(key)
            if call is not None and call.device >= 0:
                return call(tensors)
            values = arguments.bind(args, kwargs)
            refuse(values)
            if call is not None:  # On a CPU, where a check looks at contents, too.
                return call(tensors)
            result = replays.run(key, tensors, values)
            first = result[0] if isinstance(result, tuple) else result
            if key is not None and not autocast and isinstance(first.grad_fn, kernels.direct._backward_cls):
                values = values if dim_at < 0 else values[:dim_at] + values[dim_at + 1 :]
                if (recorded := kernels.recorded(tensors, values)) is not None:
                    replays.calls[key] = recorded
            return result

        public.__module__ = module
        public.kernels = kernels  # type: ignore[attr-defined]
        return cast(F, public)

    def _refuse_devices(self, lead: Tensor, other: Tensor, values: Sequence[Any]) -> None:
        first, name = (next(n for n, v in zip(self.arguments.names, values, strict=True) if v is t) for t in (lead, other))
        raise ValueError(f"{self.name}: {name} must be on {lead.device}, where {first} is, got {other.device}")


class _Kernels:
    """One backend's kernels of one op: the two doors, and the room behind them."""

    def __init__(self, op: Op[Any], forward: Callable[..., Any], backward: Callable[..., Any] | None, module: str) -> None:
        self.op, self.forward, self.backward, self.module = op, forward, backward, module
        self.inputs = [a for a in op.arguments.all if not (op.rows and a.name == "dim")]
        self.names = [a.name for a in self.inputs]
        self.made = {**op.outputs, **op.extras}
        asked = [f"return_{name}" for name in op.outputs]
        self.asked_at = [self.names.index(name) if name in self.names else None for name in asked]
        self.differentiable = [self.names.index(name) for name in op.grads]
        self.same = [(list(op.grads).index(name), list(op.grads).index(other)) for name, other in op.same.items()]
        self.ahead = "needs" in inspect.signature(forward).parameters
        self.given = list(inspect.signature(backward).parameters) if backward else []
        self.incoming = [name for name in self.given if name.startswith("grad_") and name[5:] in op.outputs]
        self.saved = [name for name in self.given if name not in (*self.incoming, "needs", "last")]
        unknown = {*self.saved} - {*self.names, *self.made}
        if backward and (unknown := unknown | {*op.grads.values()} - {*self.given}):
            raise TypeError(f"{op.name}: the backward's parameters must name what the op has: {sorted(unknown)}")
        known = [*self.names, *self.made]
        self.saved_at = [known.index(name) for name in self.saved]
        self.incoming_at = [list(op.outputs).index(name[5:]) for name in self.incoming]
        self.rows, self.back_rows = Rows(op.rows, self.names), Rows(op.rows, self.given)
        self.replay_forward = Replays(self.run_forward, records="forward" not in op.library)
        self.replay_backward = Replays(self.run_backward, records="backward" not in op.library)
        self.replays = [self.replay_forward, self.replay_backward]
        self._register()

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
                results = call.forward([*tensors])
                call.save(ctx, tensors, results)
                returned = [results[i] for i in call.returned]
                return returned[0] if len(returned) == 1 else tuple(returned)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
                return None, *ctx.call.gradients(ctx, grads, ctx.needs_input_grad[1:])

        self.direct = Direct
        # `Direct.apply` without its look for functorch's transforms, which calls that are watched have been asked about.
        self.apply = super(torch.autograd.Function, Direct).apply  # pyright: ignore[reportAttributeAccessIssue]

    def forget(self) -> None:
        """Lets every next call run anew, as with another configuration."""
        for replays in self.replays:
            replays.forget()

    def recorded(self, tensors: Sequence[Tensor], values: Sequence[Any]) -> "_Call | None":
        """A differentiable call of these values, if its forward is replayed by now and takes the tensors in this order."""
        found = self.replay_forward.find(layout(values)[0])
        same = [id(v) for v in values if isinstance(v, Tensor)] == [id(t) for t in tensors]
        return None if found is None or not same else _Call(self, values, found)

    # The doors.

    def __call__(self, values: list[Any]) -> Any:
        tensors = [value for value in values if isinstance(value, Tensor)]
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if grad:
            self._refuse_fixed(values)
        values = self.with_needs(values, grad)
        if _watched() or not all(type(t) in PLAIN for t in tensors):
            if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
                raise RuntimeError(f"{self.op.name}: torch.func transforms are not supported; use torch.autograd")
            return self._returned(values, self.registered(*values))
        if grad:
            return _Call(self, values)([v for v in values if isinstance(v, Tensor)])
        return self._returned(values, self.run_forward(*values))

    def with_needs(self, values: list[Any], grad: bool) -> list[Any]:
        """The forward's arguments."""
        if not self.ahead:
            return values
        needs = (isinstance(t, Tensor) and grad and t.requires_grad for t in (values[i] for i in self.differentiable))
        return [*values, tuple(needs)]

    def _refuse_fixed(self, values: list[Any]) -> None:
        for name, value in zip(self.names, values, strict=True):
            if isinstance(value, Tensor) and value.requires_grad and (name not in self.op.grads or self.backward is None):
                raise ValueError(f"{self.op.name}: {name} must not require grad, for it gets none; got requires_grad=True")

    def _returns(self, values: Sequence[Any]) -> Sequence[int]:
        """The positions among the outputs of those that the caller sees."""
        return [i for i, at in enumerate(self.asked_at) if at is None or values[at]]

    def _returned(self, values: Sequence[Any], results: Any) -> Any:
        """What the caller sees of the outputs and extras."""
        if isinstance(results, Tensor):
            return results
        kept = [results[i] for i in self._returns(values)]
        return kept[0] if len(kept) == 1 else tuple(kept)

    def _register(self) -> None:
        op, space = self.op, self.module.partition(".")[0]
        self.library = library = torch.library.Library(space, "FRAGMENT")

        def define(name: str, arguments: list[str], returns: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
            library.define(f"{name}({', '.join(arguments)}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
            library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{space}::{name}", fake, lib=library)
            return getattr(getattr(torch.ops, space), name).default

        def refuse(ctx: Any, *grads: Any) -> Any:
            raise RuntimeError(f"{op.name}: double backward is not supported; its backward has no derivative")

        def save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            results = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*results[len(op.outputs) :])
            _Call(self, inputs).save(ctx, [v for v in inputs if isinstance(v, Tensor)], results)

        def gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            call, needs = ctx.call, ctx.needs_input_grad
            result: list[Tensor | None] = [None] * len(needs)
            found = call.gradients(ctx, [grads[i] for i in call.returned], tuple([needs[i] for i in call.tensors_at]))
            for i, grad in zip(call.tensors_at, found, strict=True):
                result[i] = grad
            return tuple(result)

        returns = "Tensor" if len(self.made) == 1 else f"({', '.join(['Tensor'] * len(self.made))})"
        schemas = {a.name: a.schema for a in self.inputs} | ({"needs": "bool[] needs"} if self.ahead else {})
        self.registered = define(op.name, [*schemas.values()], returns, _alone(self.replay_forward), _alone(self.fake_forward))
        if self.backward is not None:
            back = f"{op.name}_backward"
            takes = (
                [f"Tensor? {n}" for n in self.incoming] + [schemas.get(n, f"Tensor {n}") for n in self.saved] + ["bool[] needs"]
            )
            self.registered_backward = define(
                back,
                takes,
                "Tensor[]",
                lambda *values: self.replay_backward(*values[:-1], tuple(values[-1])),
                self.fake_backward,
            )
            torch.library.register_autograd(f"{space}::{op.name}", gradients, setup_context=save, lib=library)
            torch.library.register_autograd(f"{space}::{back}", refuse, lib=library)

    # The room: rows flattened, kernels launched on the tensors' own device, shapes restored.

    def run_forward(self, *values: Any) -> tuple[Tensor, ...]:
        if any(isinstance(value, Tensor) and value.numel() == 0 for value in values):
            return self._empty_forward(values)
        flat, shape = self.rows.flatten(values)
        results = self._launch(self.forward, flat)
        if shape is None:
            return results
        return tuple(self.rows.restore(name, t, shape) for name, t in zip(self.made, results, strict=True))

    def fake_forward(self, *values: Any) -> tuple[Tensor, ...]:
        flat, shape = self.rows.flatten(values)
        return tuple(self.rows.restore(name, make(*flat), shape) for name, make in self.made.items())

    def run_backward(self, *values: Any, last: bool = False) -> list[Tensor]:
        return self._backward(values, lambda flat: self._launch(self.backward, flat), last)

    def fake_backward(self, *values: Any) -> list[Tensor]:
        looks = [self.given.index(name) for name in self.op.grads.values()]
        return self._backward(values, lambda flat: [None if flat[i] is None else torch.empty_like(flat[i]) for i in looks])

    def _backward(
        self, values: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Tensor | None]], last: bool = False
    ) -> list[Tensor]:
        known, needs = dict(zip((*self.incoming, *self.saved, "needs"), values, strict=True)), values[-1]
        known["last"] = last
        if any(isinstance(t, Tensor) and t.numel() == 0 for name, t in known.items() if name not in self.op.extras):
            return [torch.zeros_like(known[like]) for like, need in zip(self.op.grads.values(), needs, strict=True) if need]
        flat, shape = self.back_rows.flatten([known[name] for name in self.given])
        grads = zip(self.op.grads, run(flat), needs, strict=True)
        return [self.back_rows.restore(name, t, shape) for name, t, need in grads if need and t is not None]

    def _empty_forward(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """Only the registered door comes here: a size that is unknown when it is traced may be zero when it runs."""
        options = dict(zip(self.names, values))  # noqa: B905 (`needs` comes after)
        public = self.op.fn(**options)
        known = dict(zip(self.op.returned(options), public if isinstance(public, tuple) else (public,), strict=True))
        return tuple(known.get(name, fake) for name, fake in zip(self.made, self.fake_forward(*values), strict=True))

    def _launch(self, kernels: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        t = next(value for value in values if isinstance(value, Tensor))
        try:
            if t.is_cuda and t.get_device() != torch.cuda.current_device():
                with torch.cuda.device(t.device):
                    results = kernels(*values)
            else:
                results = kernels(*values)
        except Exception as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.op.name}: the first call of a kernel compiles and loads it, which a CUDA graph cannot record; "
                    "call it once with these shapes and dtypes before the capture"
                ) from error
            raise
        return results if isinstance(results, tuple) else (results,)


class _Call:
    """A differentiable call: what its forward hands to its backward, and all of it that repeats with tensors alike."""

    def __init__(self, kernels: _Kernels, values: Sequence[Any], recorded: Replay | None = None) -> None:
        self.kernels = kernels
        self.values = [None if isinstance(v, Tensor) else v for v in values]
        self.tensors_at = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        self.forward = self._run if recorded is None else recorded
        self.device = -1 if recorded is None else recorded.device
        self.returned = kernels._returns(values)
        # Places in what is known, (*tensors, *results), of what is saved, and in what the backward takes.
        place = {at: i for i, at in enumerate(self.tensors_at)}
        place |= {len(kernels.names) + i: len(place) + i for i in range(len(kernels.made))}
        self.saved = [place[at] for at in kernels.saved_at if at in place]
        self.saved_to = [i for i, at in enumerate(kernels.saved_at) if at in place]
        self.others = [None if at in place else values[at] for at in kernels.saved_at]
        self.incoming = [self.returned.index(at) if at in self.returned else None for at in kernels.incoming_at]
        self.wanted = [place.get(at) for at in kernels.differentiable]
        dtypes = [getattr(values[at], "dtype", None) for at in kernels.differentiable]
        self.same = [(i, j) for i, j in kernels.same if dtypes[i] == dtypes[j]]
        self.plans: dict[tuple[bool, ...], tuple[tuple[bool, ...], list[int | None]]] = {}
        self.backwards: dict[Any, Replay] = {}

    def __call__(self, tensors: list[Tensor]) -> Any:
        return self.kernels.apply(self, *tensors)

    def _run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        values = self.values.copy()
        for at, t in zip(self.tensors_at, tensors, strict=True):
            values[at] = t
        return self.kernels.replay_forward(*values)

    def save(self, ctx: Any, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        known = (*tensors, *results)
        ctx.call = self
        ctx.save_for_backward(*[known[i] for i in self.saved])

    def gradients(self, ctx: Any, grads: Sequence[Tensor], needs: tuple[bool, ...]) -> list[Tensor | None]:
        """Those of the tensors that are needed, from those of the outputs that were returned."""
        plan = self.plans.get(needs)
        if plan is None:
            plan = self.plans[needs] = self._plan(needs)
        make, order = plan
        found = self._backward([None if i is None else grads[i] for i in self.incoming], ctx.saved_tensors, make)
        return [None if i is None else found[i] for i in order]

    def _plan(self, needs: Sequence[bool]) -> tuple[tuple[bool, ...], list[int | None]]:
        """Which gradients the backward has to make, and which of these is each tensor's."""
        wanted = [at is not None and needs[at] for at in self.wanted]
        make, source = wanted.copy(), list(range(len(wanted)))
        for i, j in self.same:
            make[i], make[j], source[i] = False, make[i] or make[j], j
        order: list[int | None] = [None] * len(self.tensors_at)
        for at, want, i in zip(self.wanted, wanted, source, strict=True):
            if want:
                order[at] = sum(make[:i])  # type: ignore[call-overload]
        return tuple(make), order

    def _backward(self, incoming: list[Tensor | None], saved: Sequence[Tensor | None], make: tuple[bool, ...]) -> Any:
        # With create_graph the registered door records the graph, so that a second derivative is refused by name.
        registered = torch.is_grad_enabled() or _watched()
        key, tensors = (None, []) if registered else layout((*incoming, *saved))
        call = self.backwards.get((make, key))
        if call is not None and is_here(call.device):
            return call(tensors)
        kept = self.others.copy()
        for at, t in zip(self.saved_to, saved, strict=True):
            kept[at] = t
        if registered:
            return self.kernels.registered_backward(*incoming, *kept, make)
        if "last" in self.kernels.given:
            return self.kernels.run_backward(*incoming, *kept, make, last=not _keeps_graph())
        replay = self.kernels.replay_backward
        result = replay(*incoming, *kept, make)
        if key is not None and (call := replay.find(layout((*incoming, *kept, make))[0])) is not None:
            self.backwards[make, key] = call
        return result


_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


def _watched() -> bool:
    """Whether something has to see the call as an operator. PyTorch has no public and cheap query of most of these."""
    return (
        torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() > 0 and not recording())
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def _alone(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """As a registered operator returns it: a single result is no tuple."""

    def call(*values: Any) -> Any:
        results = run(*values)
        return results[0] if len(results) == 1 else results

    return call

"""Calls that repeat: what a call launched is launched again, without the Python that led there.

What a host function allocates and launches follows from the layouts of its tensors and the values of its other arguments.
The second call with the same ones is recorded; later ones allocate and launch as that one did. A call that does anything
else on the way, such as a copy or a sum, is never replayed. What may differ between two such calls is taken anew each time:
contents, addresses (but for their alignment), the stream.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

PLAIN = (Tensor, torch.nn.Parameter)
SIMPLE = (int, float, bool, str, type(None), torch.dtype)
MOST = 4096
"""Layouts that are remembered; then all are forgotten."""
aten = torch.ops.aten
ALLOCATES = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
Key = tuple[Any, ...]


def layout(values: Iterable[Any]) -> tuple[Key | None, list[Tensor]]:
    """All that a host function may look at, and the tensors; no key where a value is of no ordinary type."""
    key: list[Any] = []
    tensors: list[Tensor] = []
    for v in values:
        kind = type(v)
        if kind in PLAIN:
            tensors.append(v)
            key.append((v.shape, v.stride(), v.dtype, v.get_device(), v.requires_grad, v.data_ptr() & 15))
        elif kind in SIMPLE or _simple(v):
            key.append((kind, v))
        else:
            return None, tensors
    if len(tensors) > 1:
        # Which are the same tensor: a kernel may have been compiled for that.
        first: dict[int, int] = {}
        key.append(tuple([first.setdefault(id(t), i) for i, t in enumerate(tensors)]))
    return tuple(key), tensors


def _simple(value: Any) -> bool:
    return type(value) in SIMPLE or (isinstance(value, tuple) and all(map(_simple, value)))


class Replay(NamedTuple):
    """One call. Tensors are numbered, first those that are given, then those that are allocated."""

    device: int
    allocations: list[tuple[Any, ...]]
    launches: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int, int]]]]
    """What launches, its arguments, and which of these are which tensor, how many elements on."""
    results: list[int | None]
    single: bool

    def __call__(self, tensors: list[Tensor]) -> Any:
        for like, size, stride, dtype, device in self.allocations:
            if like is None:
                tensors.append(torch.empty_strided(size, stride, dtype=dtype, device=device))
            else:  # This is faster.
                tensors.append(torch.empty_like(tensors[like]))
        for start, arguments, places in self.launches:
            arguments = arguments.copy()
            for at, i, offset in places:
                t = tensors[i]
                if self.device >= 0:  # Of a tensor, the driver would be asked where it is.
                    arguments[at] = t.data_ptr() + offset * t.itemsize
                else:
                    arguments[at] = t.as_strided((1,), (1,), t.storage_offset() + offset) if offset else t
            start(*arguments)
        if self.single:
            return tensors[self.results[0]]  # type: ignore[index]
        return tuple([None if i is None else tensors[i] for i in self.results])


class Recorder(TorchDispatchMode):
    """Sees all that a call does."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.launches: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.replayable, self.launching = True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.launching:  # Triton's interpreter at work.
            pass
        elif func in ALLOCATES:
            self.made.append(result)
        elif not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            self.replayable = False
        return result

    def replay(self, given: Sequence[Tensor], result: Any) -> Replay | None:
        """The call as recorded, if it was nothing but views, allocations and launches of what can be told apart."""
        known = [*given, *self.made]
        if not self.replayable or not all(t.numel() for t in known):
            return None
        made = list(self.made)
        launches: list[tuple[Callable[..., Any], list[Any], list[tuple[int, int, int]]]] = []
        for start, arguments in self.launches:
            places: list[tuple[int, int, int]] = []
            for at, value in enumerate(arguments):
                if isinstance(value, TensorDescriptor):  # It holds an address.
                    return None
                if isinstance(value, Tensor):
                    i = _owner(value, known)
                    if i is None:
                        return None
                    places.append((at, i, int(value.storage_offset() - known[i].storage_offset())))
            launches.append((start, [None if isinstance(a, Tensor) else a for a in arguments], places))
        results: list[int | None] = []
        for t in result if isinstance(result, (tuple, list)) else (result,):
            i = None if t is None else _owner(t, known)
            results.append(i)
            if t is None or (i is not None and t is known[i]):
                continue
            # Kernels know an allocation by its address: it may as well be made in the shape that is returned.
            if i is None or i < len(given) or results.count(i) > 1 or t.numel() != known[i].numel() or t.storage_offset():
                return None
            made[i - len(given)] = t
        allocations: list[tuple[Any, ...]] = []
        for t in made:
            like = [
                i
                for i, g in enumerate(given)
                if g.is_contiguous() and t.is_contiguous() and (g.shape, g.dtype) == (t.shape, t.dtype)
            ]
            allocations.append((like[0] if like else None, t.shape, t.stride(), t.dtype, t.device))
        return Replay(known[0].get_device(), allocations, launches, results, isinstance(result, Tensor))


def _owner(t: Tensor, known: Sequence[Tensor]) -> int | None:
    """Which of the known tensors this one is, or begins with, or lies in, if it is one alone."""
    storage = t.untyped_storage().data_ptr()
    for same in (
        lambda k: k is t,
        lambda k: k.data_ptr() == t.data_ptr() and k.dtype == t.dtype,
        lambda k: k.untyped_storage().data_ptr() == storage and k.dtype == t.dtype,
    ):
        found = [i for i, k in enumerate(known) if same(k)]
        if found:
            return found[0] if len(found) == 1 or known[found[0]] is t else None
    return None


def launch(run: Callable[..., Any], kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """Launches by `run(kernel, grid, *arguments, **options)`, which returns the compiled kernel; all launches come here."""
    recorder = _get_current_dispatch_mode()
    if not isinstance(recorder, Recorder):
        return run(kernel, grid, *arguments, **options)
    recorder.launching = True
    compiled = run(kernel, grid, *arguments, **options)
    recorder.launching = False
    # Triton's interpreter compiles nothing.
    again = partial(run, kernel, grid, **options) if compiled is None else starter(compiled, (*grid, 1, 1)[:3])
    recorder.launches.append((again, arguments))
    return compiled


def starter(compiled: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Launches a compiled kernel on the current stream of the current device.

    It is what `compiled[grid]` does, but for what that prepares for hooks that are not there.
    """
    plain, run, function, metadata = compiled[grid], compiled.run, compiled.function, compiled.packed_metadata
    active: Any = driver.active
    runtime, device, stream_of = knobs.runtime, torch.cuda.current_device(), active.get_current_stream

    def start(*arguments: Any) -> None:
        if getattr(runtime.launch_enter_hook, "calls", True) or getattr(runtime.launch_exit_hook, "calls", True):
            plain(*arguments)
        else:
            run(*grid, stream_of(device), function, metadata, None, None, None, *arguments)

    return start


def is_here(device: int) -> bool:
    """Whether launches go to this device; a CPU is -1."""
    return device < 0 or device == torch.cuda.current_device()


def recording() -> bool:
    return isinstance(_get_current_dispatch_mode(), Recorder)


class Replays:
    """A function whose calls are replayed where nobody differentiates them."""

    def __init__(self, function: Callable[..., Any], *, records: bool = True) -> None:
        self.function, self.records = function, records
        self.calls: dict[Key, Any] = {}
        """What takes the tensors of a call, and repeats it; None for what cannot be replayed."""
        self.seen: set[Key] = set()

    def __call__(self, *values: Any) -> Any:
        key, tensors = layout(values)
        call = self.find(key)
        return self.run(key, tensors, values) if call is None else call(tensors)

    def find(self, key: Key | None) -> Any:
        call = self.calls.get(key) if key else None
        return call if call is None or is_here(call.device) else None

    def run(self, key: Key | None, tensors: list[Tensor], values: Sequence[Any]) -> Any:
        """A call that is not replayed, or not yet: the first one compiles, the second is recorded."""
        device = tensors[0].get_device() if tensors else -1
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if self.records and key in self.seen and key not in self.calls and is_here(device) and not differentiated:
            with Recorder() as recorder:
                result = self.function(*values)
            self.calls[key] = recorder.replay(tensors, result)
            return result
        result = self.function(*values)
        if key is not None:
            if len(self.seen) >= MOST:
                self.forget()
            self.seen.add(key)
        return result

    def forget(self) -> None:
        self.seen.clear()
        self.calls.clear()

"""The arguments of an op, read once from its definition's signature: how they bind, what they take, their schema."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PLAIN = (Tensor, torch.nn.Parameter)
SCHEMA = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str", torch.dtype: "ScalarType"}
TAKES = {
    bool: ("a bool", (bool,)),
    int: ("an int", (int, torch.SymInt)),
    float: ("a float", (float, int, torch.SymFloat, torch.SymInt)),
    torch.dtype: ("a torch.dtype", (torch.dtype,)),
}


def has_values(t: Tensor) -> bool:
    """Whether a check may look at them: a GPU would have to be waited for, and compilers and fake tensors have none."""
    return not t.is_cuda and type(t) is Tensor and not torch.compiler.is_compiling()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Argument:
    """One argument: `Tensor`, `bool`, `int`, `float`, `torch.dtype` or a `Literal`, each possibly `| None`."""

    name: str
    default: Any
    kind: type
    optional: bool
    options: tuple[Any, ...]
    """The dtypes of a tensor, the values of a `Literal`."""

    @classmethod
    def read(cls, parameter: inspect.Parameter, hint: Any, dtypes: tuple[torch.dtype, ...]) -> "Argument":
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        arms = typing.get_args(hint) if union else (hint,)
        (kind,) = (arm for arm in arms if arm is not types.NoneType)
        options = dtypes if kind is Tensor else ()
        if typing.get_origin(kind) is Literal:
            kind, options = str, typing.get_args(kind)
        return cls(parameter.name, parameter.default, kind, types.NoneType in arms, options)

    @property
    def schema(self) -> str:
        return f"{SCHEMA[self.kind]}{'?' if self.optional else ''} {self.name}"

    def refuse(self, op: str, value: Any) -> None:
        """Raises if the value is not one that the annotation admits."""
        if value is None and self.optional:
            return
        wants, error, got = f"{op}: {self.name} must be", TypeError, f"{value!r:.80}"
        none = " or None" if self.optional else ""
        if self.kind is Tensor:
            if isinstance(value, Tensor):
                if value.dtype in self.options:
                    return
                got = _name(value.dtype)
            else:
                got = type(value).__name__
            takes = f"a tensor of {', '.join(map(_name, self.options))}"
        elif self.kind is str:
            if isinstance(value, str) and value in self.options:
                return
            takes, error = " or ".join(map(repr, self.options)), ValueError
        else:
            takes, kinds = TAKES[self.kind]
            if isinstance(value, kinds) and (self.kind is bool or not isinstance(value, bool)):
                return
        raise error(f"{wants} {takes}{none}, got {got}")


class Arguments:
    """All arguments of an op."""

    def __init__(self, fn: Callable[..., Any], dtypes: Mapping[str, tuple[torch.dtype, ...]]) -> None:
        self.op, self.signature = fn.__name__, inspect.signature(fn)
        hints, parameters = typing.get_type_hints(fn), self.signature.parameters
        self.all = [Argument.read(p, hints[p.name], dtypes.get(p.name, FLOATS)) for p in parameters.values()]
        self.names = [a.name for a in self.all]
        self.position = {name: i for i, name in enumerate(self.names)}
        self._defaults = [a.default for a in self.all]
        self._positional = sum(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters.values())

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All values in the signature's order; as `inspect.Signature.bind`, at a tenth of its time."""
        values = [*args, *self._defaults[len(args) :]]
        clear = len(args) <= self._positional
        for name, value in kwargs.items():
            i = self.position.get(name, -1)
            if i < len(args):
                clear = False
            else:
                values[i] = value
        if clear and not any(value is inspect.Parameter.empty for value in values):
            return values
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.op}: {error}; it takes {self.signature}") from None
        bound.apply_defaults()
        return list(bound.arguments.values())

    def refuse(self, values: Sequence[Any]) -> None:
        """Raises for a value that its annotation does not admit."""
        for argument, value in zip(self.all, values, strict=True):
            kind = type(value)
            if kind in PLAIN:
                if value.dtype in argument.options:
                    continue
            elif kind is argument.kind and not argument.options:
                continue
            argument.refuse(self.op, value)

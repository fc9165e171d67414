"""What Triton's interpreter lacks, filled in: kernels then run on a machine without a GPU.

Backends call this when `TRITON_INTERPRET=1`. It changes Triton's and Helion's own modules, in that mode only.
"""

import dataclasses
import functools
import inspect
import sys
from typing import Any

import torch

ELEMENTWISE = """
    abs acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot
    isinf isnan lgamma log log10 log1p log2 nextafter pow round rsqrt sin sinh sqrt tan tanh trunc
"""
RENAMED = {"fast_expf": "exp", "fast_log2f": "log2", "fast_dividef": "div", "div_rn": "div"} | dict.fromkeys(
    ("rint", "nearbyint", "llrint"), "round"
)


def fill_in() -> None:
    """Gives libdevice its functions, bfloat16 its rounding, a block the type of the scalar mask that fills it; and hurries."""
    _libdevice()
    _bfloat16()
    _masks()
    _hurry()


@functools.cache
def _libdevice() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    def elementwise(function: Any) -> Any:
        def call(*arguments: Any, _semantic: Any = None, **_: Any) -> Any:
            tensors: list[Any] = [
                a if isinstance(a, tl.tensor) else interpreter.interpreter_semantic.to_tensor(a) for a in arguments
            ]
            like = max(tensors, key=lambda t: t.dtype.primitive_bitwidth)
            result = function(*(torch.as_tensor(t.handle.data) for t in tensors))
            dtype = tl.int1 if result.dtype == torch.bool else like.dtype.scalar
            data = result.numpy().astype(bool if dtype is tl.int1 else like.handle.data.dtype)
            shape = list(data.shape)
            return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape) if shape else dtype)

        return call

    for name in ELEMENTWISE.split():
        setattr(libdevice, name, elementwise(getattr(torch, name, None) or getattr(torch.special, name)))
    for name, meaning in RENAMED.items():
        setattr(libdevice, name, elementwise(getattr(torch, meaning)))


@functools.cache
def _bfloat16() -> None:
    """Rounds to the nearest, where the interpreter cuts the lower half off."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, rounding)

    interpreter._convert_float = convert_float


@functools.cache
def _masks() -> None:
    """The interpreter takes a comparison for a value of the type that was compared."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    splat = builder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        return splat(self, kind, interpreter.TensorHandle(value.data, tl.int1) if value.data.dtype == bool else value)

    builder.create_splat = create_splat


@functools.cache
def _hurry() -> None:
    """Spares a check for overflow of each sum of indices, and a search for builtins at each call: an eighth of tests' time."""
    from triton.language import core
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    builtins = functools.cache(lambda module: [name for name, member in inspect.getmembers(module) if core.is_builtin(member)])

    def patch_builtin(module: Any, *rest: Any) -> None:
        for name in builtins(module):
            if core.is_builtin(member := getattr(module, name)):
                interpreter._patch_attr(module, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


def processors(helion_modules: str = "helion") -> None:
    """Lets Helion's persistent kernels ask a CPU for its number of multiprocessors: one, so that barriers return."""
    for name, module in list(sys.modules.items()):
        if name.startswith(helion_modules) and hasattr(module, "get_num_sm"):
            module.get_num_sm = lambda device, *, reserved_sms=0: 1  # type: ignore[attr-defined]

"""A linear layer and the cross entropy of its results: the head of a language model."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ._linear_cross_entropy import Options
from ._op import Cost, Draw, Op
from .cross_entropy import check_losses, cross_entropy
from .cross_entropy import eager as eager_cross_entropy


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, weight: Tensor | None = None,
    ignore_index: int = -100, reduction: Literal["mean", "sum", "none"] = "mean", label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, dtype: torch.dtype | None = None, return_lse: bool = False,
    extra_memory: float = 1.0,
) -> Any:  # fmt: skip
    """`cross_entropy(linear(input, linear_weight, linear_bias), target, ...)`, without all of the logits in memory.

    The products are left to cuBLAS; they take nearly all of the time. A forward that is differentiated makes the gradients,
    from the logits of some classes after the other: their sums are float32, and each is rounded once. Between the softmax's
    sums and its gradient, logits are kept where the gradient of the weight will be, and in as much memory more as is given;
    the others are computed again. With `return_lse` or the reduction "none", where a backward can ask for any mixture of
    rows, gradients are made in the backward, and all logits are computed again. Where memory does not matter, cross_entropy
    of logits is faster: on an H200, 8192 rows of 4096 and 128256 classes in bfloat16 take 40 ms and 3.9 GiB with torch.compile,
    43 ms and 2.2 GiB so, 50 ms and 1.2 GiB without extra memory.

    Args:
        input: (..., H), in any strides; float32, float16 or bfloat16. Sums are float32, gradients are rounded as eager's are.
        linear_weight: (V, H), in the dtype of `input`. A frozen one costs nothing, nor does a frozen `input`.
        target: (...), int64 or int32: a class from 0 to V - 1, or `ignore_index`.
        linear_bias: (V,), in the dtype of `input`. None means none.
        weight: (V,), the classes' weights, as for `cross_entropy`. It takes no gradient.
        ignore_index, reduction, label_smoothing, z_loss, softcap, dtype, return_lse: as for `cross_entropy`.
        extra_memory: for logits, as a multiple of the memory of `linear_weight`. With 1 the logits of twice as many rows as
            the weight has columns are computed once; with 0 those of half as many.

    Returns:
        The loss, a scalar or for "none" (...), by default in the dtype of `input` (float32 under autocast, where the product
        is in autocast's dtype); with `return_lse` a pair of it and `lse`, (...) in float32.

    Raises:
        TypeError: an argument is of another type, or a tensor of another dtype.
        ValueError: shapes do not match; an option is out of range; `input` is not on a GPU. A target out of range raises on a
            CPU. On a GPU that would have to be waited for: the loss is NaN.

    As `torch.nn.functional.linear_cross_entropy` of PyTorch 2.13. float16 gradients are scaled in between.
    """
    return cross_entropy(
        torch.nn.functional.linear(input, linear_weight, linear_bias), target, weight=weight, ignore_index=ignore_index,
        reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, dtype=dtype,
        return_lse=return_lse,
    )  # fmt: skip


def eager(input, linear_weight, target, *, linear_bias=None, extra_memory=1.0, **options) -> Any:
    return eager_cross_entropy(torch.nn.functional.linear(input, linear_weight, linear_bias), target, **options)


def check(
    input, linear_weight, target, linear_bias, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, dtype,
    return_lse, extra_memory,
) -> None:  # fmt: skip
    name = "linear_cross_entropy"
    if linear_weight.ndim != 2 or not linear_weight.shape[0]:
        raise ValueError(f"{name}: linear_weight must have shape (V, H), V at least 1, got {tuple(linear_weight.shape)}")
    V, H = linear_weight.shape
    if input.ndim == 0 or input.shape[-1] != H:
        raise ValueError(f"{name}: input must have shape (..., {H}), as linear_weight's last, got {tuple(input.shape)}")
    if linear_bias is not None and linear_bias.shape != (V,):
        raise ValueError(f"{name}: linear_bias must have shape ({V},), got {tuple(linear_bias.shape)}")
    for argument, t in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if t is not None and t.dtype != input.dtype:
            raise TypeError(f"{name}: {argument} must have the dtype of input, {input.dtype}, got {t.dtype}")
    if not 0 <= extra_memory < math.inf:
        raise ValueError(f"{name}: extra_memory must be 0 or more, got {extra_memory}")
    check_losses(name, input.shape[:-1], V, target, weight, ignore_index, label_smoothing, z_loss, softcap, dtype)


def autocast(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Any, *rest: Any) -> Mapping[str, Any]:
    low = torch.get_autocast_dtype(input.device.type)
    changed = {"input": input.to(low), "linear_weight": linear_weight.to(low), "dtype": rest[-3] or torch.float32}
    return changed if linear_bias is None else {**changed, "linear_bias": linear_bias.to(low)}


def head(N: int, H: int, V: int, *, bias: bool = False, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        matrix = draw(V, H) * H**-0.5
        shift = {"linear_bias": draw(V)} if bias else {}
        return {"input": draw(N, H), "linear_weight": matrix, "target": draw.integers(0, V, N), **shift, **options}

    return make


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield head(3, 8, 1)(draw)
    yield head(9, 16, 65)(draw)
    yield head(33, 16, 129, bias=True, reduction="none")(draw)
    everything = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "dtype": torch.float32}
    yield head(130, 8, 65, bias=True, weight=draw(65).abs(), reduction="sum", **everything)(draw)
    yield head(31, 24, 300, bias=True, extra_memory=0.0, weight=draw(300).abs(), **everything)(draw)
    yield head(6, 8, 65, ignore_index=3, return_lse=True)(draw) | {"target": draw.integers(2, 5, 6).int()}
    yield head(192, 8, 17, z_loss=1e-2)(draw)
    yield head(3, 8, 65)(draw) | {"target": torch.full((3,), -100, device=draw.device)}


def cost(input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Any = None, **_: Any) -> tuple[Cost, Cost]:
    read, product = input.nbytes + linear_weight.nbytes + target.nbytes, 2 * input.numel() * linear_weight.shape[0]
    return Cost(read, product), Cost(2 * read, 2 * product)


workloads = {
    "llama-3.1-8b/train-8k": head(8192, 4096, 128256),
    "llama-3.1-8b/train-8k-least-memory": head(8192, 4096, 128256, extra_memory=0.0),
    "qwen-3-0.6b/train-16k": head(16384, 1024, 151936),
    "gemma-3-4b/train-4k": head(4096, 2560, 262208),
    "gemma-2-9b/train-4k": head(4096, 3584, 256000, softcap=30.0),
    "llama-3.2-1b/eval-512": head(512, 2048, 128256, reduction="none", dtype=torch.float32),
    "gpt-2/odd-1000": head(1000, 768, 50257),
}


def ahead(values: Any, i: int) -> bool:
    """Whether the forward makes this gradient, by a kernel's arguments."""
    return Options(*values[4:-1]).ahead(values[-1][i])


op = Op(
    fn=linear_cross_entropy,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={
        "out": lambda input, linear_weight, target, linear_bias, weight, ignore_index, reduction, *rest: input.new_empty(
            target.shape if reduction == "none" else (), dtype=rest[3] or input.dtype
        ),
        "lse": lambda input, linear_weight, target, *_: input.new_empty(target.shape, dtype=torch.float32),
    },
    extras={
        "total": lambda input, *_: input.new_empty(2, dtype=torch.float32),
        "made_input": lambda *values: torch.empty_like(values[0]) if ahead(values, 0) else values[0].new_empty(0),
        "made_weight": lambda *values: torch.empty_like(values[1]) if ahead(values, 1) else values[1].new_empty(0),
        "made_bias": lambda *values: values[1].new_empty(values[1].shape[0] if ahead(values, 2) else 0),
    },
    grads={"input": "input", "linear_weight": "linear_weight", "linear_bias": "linear_bias"},
    rows={"input": 1, "target": 0, "out": 0, "lse": 0},
    dtypes={"target": (torch.int64, torch.int32)},
    eager=eager,
    autocast=autocast,
    library=["forward", "backward"],
    # Products are summed in another order than the definition's.
    slack={torch.float32: 32},
)

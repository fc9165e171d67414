"""Log softmax along one dimension."""

from functools import partial

import torch
from torch import Tensor

from ._op import Op
from .softmax import check, cost, samples


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Logarithm of softmax: `x - max(x) - log(sum(exp(x - max(x))))` along `dim`.

    Args:
        x: any shape of one dimension or more; float32, float16 or bfloat16. The arithmetic is float32.
        dim: the dimension whose exponentials sum to one.

    Returns:
        A tensor with the shape and dtype of `x`, `-inf` where `x` is. A slice of `-inf` alone, or with a `+inf` or NaN in
        it, is NaN.

    Raises:
        TypeError: `x` is no tensor, or of another dtype; `dim` is no int.
        ValueError: `x` has no dimension or is not on a GPU; `dim` is out of range.

    As `torch.nn.functional.log_softmax`.
    """
    z = x - x.amax(dim, keepdim=True) if x.shape[dim] else x
    return z - z.exp().sum(dim, keepdim=True).log()


workloads = {
    # Log-probabilities as wide as the vocabulary, for each token of a training batch, or of a sampling step.
    "llama-3.1-8b/logprobs-1k": lambda draw: {"x": draw(1024, 128256)},
    "qwen-3-8b/logprobs-4k": lambda draw: {"x": draw(4096, 151936)},
    "gemma-3-27b/sample-64": lambda draw: {"x": draw(64, 262144)},
    "mistral-7b/decode-16": lambda draw: {"x": draw(16, 32768)},
    "square-8k": lambda draw: {"x": draw(8192, 8192)},
    "odd-50257": lambda draw: {"x": draw(1000, 50257)},
}


op = Op(
    fn=log_softmax,
    check=partial(check, "log_softmax"),
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={"out": torch.empty_like},
    grads={"x": "out"},
    rows={"x": 1, "out": 1},
    eager=lambda x, dim=-1: torch.nn.functional.log_softmax(x, dim),
    autocast=lambda x, dim: {"x": x.float()},
    # What is saved for the backward is the logarithm, of size 10 or so: exp of it has its roundings.
    slack={torch.float32: 16},
)

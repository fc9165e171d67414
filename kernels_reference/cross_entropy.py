"""Cross entropy with class indices: label smoothing, z-loss and soft-capped logits."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ._arguments import FLOATS, has_values
from ._op import Cost, Draw, Op


def cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, dtype: torch.dtype | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Cross entropy of each row of logits with its target's class, reduced over the rows.

    With `z = logits`, or `softcap * tanh(logits / softcap)`; `lse = log(sum_c exp(z[c]))`; V classes; `w` their weights or 1;
    `t` the target and `s` the label smoothing, the loss of a row is
    `(1 - s) * w[t] * (lse - z[t]) + s / V * sum_c w[c] * (lse - z[c])`, and its z-loss is `z_loss * lse ** 2`.

    Args:
        logits: (..., V), in any strides; float32, float16 or bfloat16. The arithmetic is float32.
        target: (...), int64 or int32: a class from 0 to V - 1, or `ignore_index`.
        weight: (V,), in any of the dtypes of `logits`. It takes no gradient.
        ignore_index: rows with this target count for nothing and get no gradient. It may itself be a class.
        reduction: "none" gives each row's loss plus z-loss, "sum" their sum, "mean" the losses' sum over that of `w[t]` plus
            the mean z-loss, both over the rows that count: NaN where none does.
        label_smoothing: from 0 to 1.
        z_loss: 0 or more. It keeps `lse` near 0; PaLM takes 1e-4.
        softcap: bounds the logits to +-softcap; Gemma 2 takes 30.
        dtype: the loss's, by default that of `logits` (float32 under autocast). float32 needs no float32 copy of the logits.
        return_lse: return `lse` too. It is differentiable, and ignored rows have it as well.

    Returns:
        The loss, a scalar or for "none" (...); with `return_lse` a pair of it and `lse`, (...) in float32. The loss of a row
        whose target has the logit -inf is inf.

    Raises:
        TypeError: an argument is of another type, or a tensor of another dtype.
        ValueError: shapes do not match; an option is out of range; `logits` is not on a GPU. A target out of range raises on a
            CPU. On a GPU that would have to be waited for: the row's loss and gradient are NaN.

    As `torch.nn.functional.cross_entropy` in two dimensions; in more, that one has the classes in dimension 1. To predict the
    next token shift `target`, not `logits`: the rows of `logits[:, :-1]` have no common stride, and are copied.
    Label smoothing: Szegedy et al. 2016; z-loss: PaLM (2022); soft-capping: Gemma 2 (2024).
    """
    z = capped(logits, softcap)
    lse, w = torch.logsumexp(z, -1), z.new_ones(z.shape[-1]) if weight is None else weight
    counts = target != ignore_index
    t = torch.where(counts, target, 0).long()
    loss = w[t] * (lse - z.gather(-1, t[..., None])[..., 0])
    if label_smoothing:
        smooth = (w * (lse[..., None] - z)).sum(-1) / z.shape[-1]
        loss = (1 - label_smoothing) * loss + label_smoothing * smooth
    loss = reduced(torch.where(counts, loss, 0), torch.where(counts, w[t], 0), reduction)
    if z_loss:
        loss = loss + reduced(torch.where(counts, z_loss * lse.square(), 0), counts, reduction)
    loss = loss.to(dtype or logits.dtype)
    return (loss, lse.to(torch.promote_types(lse.dtype, torch.float32))) if return_lse else loss


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def reduced(losses: Tensor, weights: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


def check(logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, dtype, return_lse) -> None:
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"cross_entropy: logits must have one class or more, got shape {tuple(logits.shape)}")
    options = weight, ignore_index, label_smoothing, z_loss, softcap, dtype
    check_losses("cross_entropy", logits.shape[:-1], logits.shape[-1], target, *options)


def check_losses(name, lead, V, target, weight, ignore_index, label_smoothing, z_loss, softcap, dtype) -> None:
    if target.shape != lead:
        raise ValueError(f"{name}: target must have the shape {tuple(lead)} of the rows, got {tuple(target.shape)}")
    if weight is not None and weight.shape != (V,):
        raise ValueError(f"{name}: weight must have shape ({V},), got {tuple(weight.shape)}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be from 0 to 1, got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"{name}: z_loss must be 0 or more, got {z_loss}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{name}: softcap must be more than 0 or None, got {softcap}")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"{name}: dtype must be float32, float16, bfloat16 or None, got {dtype}")
    if has_values(target):
        for wrong in target[((target < 0) | (target >= V)) & (target != ignore_index)]:
            raise ValueError(f"{name}: target must be from 0 to {V - 1} or ignore_index, got {int(wrong)}")


def eager(
    logits, target, *, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None,
    dtype=None, return_lse=False,
) -> Any:  # fmt: skip
    z, weight = capped(logits, softcap), None if weight is None else weight.to(logits.dtype)
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    loss = torch.nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), target.flatten().long(), weight, **options)
    loss = loss.view(target.shape) if loss.ndim else loss
    lse = torch.logsumexp(z, -1) if z_loss or return_lse else z
    if z_loss:
        counts = target != ignore_index
        loss = loss + reduced(torch.where(counts, z_loss * lse.square(), 0), counts, reduction)
    loss = loss.to(dtype or loss.dtype)
    return (loss, lse.float()) if return_lse else loss


def rows(*shape: int, **options: Any) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: {"logits": draw(*shape), "target": draw.integers(0, shape[-1], *shape[:-1]), **options}


def samples(draw: Draw) -> Iterator[dict[str, Any]]:
    yield rows(1, 1)(draw)
    yield rows(9, 129, reduction="none")(draw)
    yield rows(2, 9001)(draw)
    everything = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "return_lse": True}
    yield rows(2, 3, 1007, **everything, reduction="sum", dtype=torch.float32, weight=draw(1007).abs())(draw)
    yield rows(33, 65, ignore_index=3, weight=draw(65).abs(), z_loss=1e-3)(draw) | {"target": draw.integers(2, 5, 33)}
    yield rows(2, 65, reduction="none", z_loss=1.0, label_smoothing=1.0)(draw) | {"target": draw.integers(3, 5, 2).int()}
    yield rows(2, 129, label_smoothing=0.3, return_lse=True)(draw) | {"target": torch.full((2,), -100, device=draw.device)}
    masked = rows(4, 300, reduction="none", return_lse=True)(draw)
    masked["logits"][:2, 150:] = masked["logits"][2] = -torch.inf
    yield masked


def cost(logits: Tensor, target: Tensor, **_: Any) -> tuple[Cost, Cost]:
    n = logits.numel()
    return Cost(logits.nbytes + target.nbytes, 4 * n), Cost(2 * logits.nbytes + target.nbytes, 5 * n)


workloads = {
    "llama-3.1-8b/train-8k": rows(8192, 128256),
    "llama-3.1-70b/eval-64": rows(64, 128256, reduction="none", dtype=torch.float32),
    "qwen-3-8b/train-8k": rows(8192, 151936, z_loss=1e-4),
    "gemma-3-27b/train-4k": rows(4096, 262144),
    "gemma-2-27b/train-4k": rows(4096, 256000, softcap=30.0),
    "mistral-7b/train-16k": rows(8, 2048, 32768, label_smoothing=0.1),
    "odd-50257": rows(1000, 50257),
}


op = Op(
    fn=cross_entropy,
    check=check,
    samples=samples,
    workloads=workloads,
    cost=cost,
    outputs={
        "out": lambda logits, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, dtype, return_lse: (
            logits.new_empty(target.shape if reduction == "none" else (), dtype=dtype or logits.dtype)
        ),
        "lse": lambda logits, target, *_: logits.new_empty(target.shape, dtype=torch.float32),
    },
    # What weighted losses and z-losses are divided by: for "mean" the sum of the targets' weights and the number of rows.
    extras={"total": lambda logits, *_: logits.new_empty(2, dtype=torch.float32)},
    grads={"logits": "logits"},
    rows={"logits": 1, "target": 0, "out": 0, "lse": 0},
    dtypes={"target": (torch.int64, torch.int32)},
    eager=eager,
    autocast=lambda logits, *rest: {"dtype": rest[-2] or torch.float32},
)

"""Divergences of two distributions: a forward over rows, and a backward over tiles, from logits or log-probabilities.

With logits the forward's first pass keeps a running maximum and sum of each lane, and all that KL needs; other terms take a
second pass, backwards, whose beginning is still in the cache. Flags are None or True, for Helion builds None into the code.
"""

from typing import Any

import helion.language as hl
import torch
from torch import Tensor

from kernels_reference._config import gpu

from ._kernel import Kernel, kernel
from ._online import finite, scaled, tile

Maybe = Tensor | None
Number = float | None
Flag = bool | None


def fwd_config(x: Tensor, *rest: Any) -> dict[str, Any]:
    config = tile(x, 4 * rest[-1])
    return {**config, "block_sizes": config["block_sizes"][:1]}


def bwd_config(x: Tensor, *_: Any) -> dict[str, Any]:
    return {**tile(x, 2048), "loop_orders": [[1, 0]]}


def exp(x: Tensor, exact: Flag) -> Tensor:
    # The fast one rounds its argument, which float32 would show.
    return torch.exp2(scaled(x)) if exact is None else torch.exp(x)


def log(x: Tensor, exact: Flag) -> Tensor:
    if exact is None:
        return hl.inline_triton("libdevice.fast_log2f({0})", (x,), x) / scaled(1.0)
    return torch.log(x)


def terms(x: Tensor, y: Tensor, beta: Number, probabilities: Flag, exact: Flag) -> tuple[Tensor, Tensor, Tensor]:
    """A term, and its derivatives for log(Q), x, and log(P), y, or for P itself where y is that. Of KL where beta is None."""
    if beta is None:
        if probabilities is None:
            p = exp(y, exact)
            term = torch.where(p == 0, 0.0, p * (y - x))
            return term, -p, term + p
        # The fast logarithm takes what is less for 0.
        difference = log(torch.where(torch.abs(y) < 2.0**-126, 2.0**-126, y), exact) - x
        return torch.where(y == 0, 0.0, y * difference), -y, torch.where(y == 0, 0.0, difference + 1)
    difference = y - x
    share = torch.where(difference > 0, 1 - beta, beta)
    larger = exp(torch.maximum(x, y), exact)
    apart = torch.where(larger == 0, 0.0, torch.abs(difference))
    # By the distance of the larger from the smaller nothing overflows, and what is close does not cancel.
    if exact is None:
        ratio = torch.exp2(scaled(-apart))
        smaller = larger * ratio
        above = -log(1 - share + share * ratio, exact)
    else:
        smaller = exp(torch.minimum(x, y), exact)
        above = -torch.log1p(share * torch.expm1(-apart))
    larger_term = (1 - share) * larger * above
    smaller_term = torch.where(smaller == 0, 0.0, share * smaller * (above - apart))
    up = difference > 0
    return larger_term + smaller_term, torch.where(up, smaller_term, larger_term), torch.where(up, larger_term, smaller_term)


def row_sum(highest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Of the lanes' maxima and sums of exponentials over them, those of the row."""
    shift = finite(torch.amax(highest, dim=1))
    return shift, (total * torch.exp2(highest - shift.unsqueeze(1))).sum(dim=1)


def row_log(shift: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum in two parts: a maximum, and what is over it."""
    # Exponents are of differences to `shift`, which is this times log2(e) but for a rounding, large where logits are.
    most = shift / scaled(1.0)
    return most, log + (shift - scaled(most)) / scaled(1.0)


def moved(apart: Tensor, total_y: Tensor, from_x: Tensor, from_y: Tensor, to_x: Tensor, to_y: Tensor) -> Tensor:
    """The sum of p times the distance of both logarithms, after a change of what is subtracted from them; p was summed, too."""
    rescale = torch.exp2(from_y - to_y)
    change = (finite(from_y) - to_y) - (finite(from_x) - to_x)
    return torch.where(rescale == 0, 0.0, (apart + total_y * change) * rescale)


def counted(rows: Any, labels: Maybe, ignore_index: int) -> Tensor:
    return rows.index >= 0 if labels is None else hl.load(labels, [rows]).long() != ignore_index


def read(values: Tensor, i: int, rows: Any, M: int) -> Tensor:
    return hl.load(values, [rows.index + i * M], extra_mask=rows.index < M)


def write(values: Tensor, i: int, rows: Any, M: int, counts: Tensor, value: Tensor) -> None:
    hl.store(values, [rows.index + i * M], torch.where(counts, value, 0.0), extra_mask=rows.index < M)


def divergence_fwd(
    x: Tensor, y: Tensor, labels: Maybe, weight: Maybe, out: Maybe, logs: Tensor, sums: Tensor, total: Maybe, parts: Maybe,
    ignore_index: int, scale: Number, beta: Number, probabilities: Flag, exact: Flag, second: Flag, lanes: int,
) -> None:  # fmt: skip
    """`logs` (4 M,) has largest logits, and logarithms of the sums of exponentials over them, `sums` (2 M,) of derivatives."""
    M, V = x.size()
    lanes = hl.specialize(lanes)
    for rows in hl.tile(M):
        counts = counted(rows, labels, ignore_index)
        most_x, most_y = hl.zeros([rows]), hl.zeros([rows])
        log_x, log_y = hl.zeros([rows]), hl.zeros([rows])
        loss, sum_x, sum_y = hl.zeros([rows]), hl.zeros([rows]), hl.zeros([rows])
        if weight is not None:
            most_x, most_y = read(logs, 0, rows, M), read(logs, 1, rows, M)
            log_x, log_y = read(logs, 2, rows, M), read(logs, 3, rows, M)
        elif scale is not None:
            highest_x = hl.full([rows, lanes], float("-inf"), dtype=torch.float32)
            highest_y = hl.full([rows, lanes], float("-inf"), dtype=torch.float32)
            total_x, total_y, apart = hl.zeros([rows, lanes]), hl.zeros([rows, lanes]), hl.zeros([rows, lanes])
            for cols in hl.tile(V, block_size=4 * lanes):
                z_x = hl.load(x, [rows, cols], extra_mask=counts[:, None]).float() * scale
                z_y = hl.load(y, [rows, cols], extra_mask=counts[:, None]).float() * scale
                z_x = torch.where((cols.index < V)[None, :], z_x, float("-inf")).view(rows.block_size, 4, lanes)
                z_y = torch.where((cols.index < V)[None, :], z_y, float("-inf")).view(rows.block_size, 4, lanes)
                before_x, before_y = highest_x, highest_y
                highest_x = torch.maximum(scaled(torch.amax(z_x, dim=1)), before_x)
                highest_y = torch.maximum(scaled(torch.amax(z_y, dim=1)), before_y)
                shift_x, shift_y = finite(highest_x), finite(highest_y)
                z_x, z_y = scaled(z_x) - shift_x[:, None, :], scaled(z_y) - shift_y[:, None, :]
                p = torch.exp2(z_y)
                apart = moved(apart, total_y, before_x, before_y, shift_x, shift_y)
                apart = apart + torch.where(p == 0, 0.0, p * (z_y - z_x)).sum(dim=1)
                total_x = torch.exp2(z_x).sum(dim=1) + torch.exp2(before_x - shift_x) * total_x
                total_y = p.sum(dim=1) + torch.exp2(before_y - shift_y) * total_y
            to_x, sum_q = row_sum(highest_x, total_x)
            to_y, sum_p = row_sum(highest_y, total_y)
            log_x, log_y = torch.log(sum_q), torch.log(sum_p)
            apart = moved(apart, total_y, highest_x, highest_y, to_x[:, None], to_y[:, None])
            loss = apart.sum(dim=1) / sum_p / scaled(1.0) - (log_y - log_x)
            most_x, log_x = row_log(to_x, log_x)
            most_y, log_y = row_log(to_y, log_y)
            sum_x, sum_y = sum_x - 1, loss + 1
        if second is not None:
            losses, sums_x, sums_y = hl.zeros([rows, lanes]), hl.zeros([rows, lanes]), hl.zeros([rows, lanes])
            for back in hl.tile(V, block_size=4 * lanes):
                at = (V - 1) // (4 * lanes) * (4 * lanes) - back.begin + hl.arange(4 * lanes)
                mask = (at < V)[None, :] & counts[:, None]
                log_q = hl.load(x, [rows, at], mask).float()
                log_p = hl.load(y, [rows, at], mask).float()
                if scale is not None:
                    log_q = log_q * scale - most_x[:, None] - log_x[:, None]
                    log_p = log_p * scale - most_y[:, None] - log_y[:, None]
                term, grad_x, grad_y = terms(log_q, log_p, beta, probabilities, exact)
                term = torch.where(mask, term, 0.0)
                if out is not None:
                    hl.store(out, [rows, at], term.to(out.dtype), (at < V)[None, :])
                else:
                    losses = losses + term.view(rows.block_size, 4, lanes).sum(dim=1)
                    if scale is not None:
                        if weight is not None:
                            grad = hl.load(weight, [rows, at], mask).float()
                            grad_x, grad_y = grad_x * grad, grad_y * grad
                        sums_x = sums_x + torch.where(mask, grad_x, 0.0).view(rows.block_size, 4, lanes).sum(dim=1)
                        sums_y = sums_y + torch.where(mask, grad_y, 0.0).view(rows.block_size, 4, lanes).sum(dim=1)
            loss, sum_x, sum_y = losses.sum(dim=1), sums_x.sum(dim=1), sums_y.sum(dim=1)
        write(sums, 0, rows, M, counts, sum_x)
        write(sums, 1, rows, M, counts, sum_y)
        if weight is None:
            write(logs, 0, rows, M, counts, most_x)
            write(logs, 1, rows, M, counts, most_y)
            write(logs, 2, rows, M, counts, log_x)
            write(logs, 3, rows, M, counts, log_y)
        if parts is not None:
            write(parts, 0, rows, M, counts, counts.float())
            write(parts, 1, rows, M, counts, loss)
        if total is not None:
            total[0] = 1.0


def divergence_reduce(parts: Tensor, out: Tensor, total: Tensor, divisor: float, per_row: Flag) -> None:
    for _ in hl.grid(1):
        count, loss = parts[0, :].sum(), parts[1, :].sum()
        if per_row is None:
            total[0] = divisor
            out[0] = (loss / divisor).to(out.dtype)
        else:
            total[0] = count * divisor
            out[0] = (loss / (count * divisor)).to(out.dtype)


def divergence_bwd(
    x: Tensor, y: Tensor, labels: Maybe, weight: Maybe, grad_out: Maybe, logs: Tensor, sums: Tensor, total: Tensor,
    grad_x: Maybe, grad_y: Maybe, ignore_index: int, scale: Number, beta: Number, probabilities: Flag, exact: Flag,
) -> None:  # fmt: skip
    """The incoming gradient is `weight` (M, V), of each term, or `grad_out` (1,)."""
    M, V = x.size()
    for rows, cols in hl.tile([M, V]):
        counts = counted(rows, labels, ignore_index)
        log_q = hl.load(x, [rows, cols], extra_mask=counts[:, None]).float()
        log_p = hl.load(y, [rows, cols], extra_mask=counts[:, None]).float()
        if scale is not None:
            log_q = log_q * scale - read(logs, 0, rows, M)[:, None] - read(logs, 2, rows, M)[:, None]
            log_p = log_p * scale - read(logs, 1, rows, M)[:, None] - read(logs, 3, rows, M)[:, None]
        _, of_q, of_p = terms(log_q, log_p, beta, probabilities, exact)
        sum_x, sum_y = read(sums, 0, rows, M), read(sums, 1, rows, M)
        if weight is not None:
            each = hl.load(weight, [rows, cols], extra_mask=counts[:, None]).float()
            of_q, of_p = of_q * each, of_p * each
        if grad_out is not None:
            all_of = hl.load(grad_out, [0]).float() / hl.load(total, [0])
            of_q, of_p = of_q * all_of, of_p * all_of
            sum_x, sum_y = sum_x * all_of, sum_y * all_of
        if scale is not None:
            of_q = (of_q - exp(log_q, exact) * sum_x[:, None]) * scale
            of_p = (of_p - exp(log_p, exact) * sum_y[:, None]) * scale
        if grad_x is not None:
            grad_x[rows, cols] = torch.where(counts[:, None], of_q, 0.0).to(grad_x.dtype)
        if grad_y is not None:
            grad_y[rows, cols] = torch.where(counts[:, None], of_p, 0.0).to(grad_y.dtype)


def reduce_config(parts: Tensor, *_: Any) -> dict[str, Any]:
    return {"block_sizes": [], "reduction_loops": [4096 if parts.size(1) > 4096 else None], "num_warps": 16}


Kernels = tuple[Kernel[..., None], Kernel[..., None], Kernel[..., None]]


def kernels(op: str) -> Kernels:
    """The three above, with configurations of an op's own."""
    return (
        kernel(fwd_config, name=f"{op}_fwd")(divergence_fwd),
        kernel(reduce_config, name=f"{op}_reduce")(divergence_reduce),
        kernel(bwd_config, name=f"{op}_bwd")(divergence_bwd),
    )


def lanes_of(x: Tensor) -> int:
    # Few rows take wide programs.
    return tile(x, 4096 if x.size(0) > 256 else 8192)["block_sizes"][1] // 4


def exact(*tensors: Tensor) -> Flag:
    """Half precision hides the errors of faster functions, which AMD has not."""
    return any(t.dtype == torch.float32 for t in tensors) or gpu(tensors[0].get_device()).arch.startswith("gfx") or None


def forward(
    kernels: Kernels, x: Tensor, y: Tensor, labels: Maybe, ignore_index: int, temperature: Number, beta: Number,
    probabilities: bool, reduction: str, divide: tuple[float, bool], dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`divide` is what the sum is divided by, and whether for each row that counts."""
    M, alone = x.size(0), reduction == "none"
    out = x.new_empty(x.shape if alone else (1,), dtype=dtype)
    logs, sums, total = (x.new_empty(*shape, dtype=torch.float32) for shape in ((4, M), (2, M), (1,)))
    parts = None if alone else logs.new_empty(2, M)
    second = alone or temperature is None or beta is not None or None
    kernels[0](
        x, y, labels, None, out if alone else None, logs.view(-1), sums.view(-1), total if alone else None,
        None if parts is None else parts.view(-1), ignore_index, None if temperature is None else 1 / temperature, beta,
        probabilities or None, exact(x, y), second, lanes_of(x),
    )  # fmt: skip
    if parts is None:
        return out, logs, sums, total
    kernels[1](parts, out, total, divide[0], divide[1] or None)
    return out.view(()), logs, sums, total


def backward(
    kernels: Kernels, grad_out: Tensor, x: Tensor, y: Tensor, labels: Maybe, logs: Tensor, sums: Tensor, total: Tensor,
    ignore_index: int, temperature: Number, beta: Number, probabilities: bool, needs: tuple[bool, bool],
) -> tuple[Maybe, Maybe]:  # fmt: skip
    grad_x, grad_y = torch.empty_like(x) if needs[0] else None, torch.empty_like(y) if needs[1] else None
    logs, sums, alone = logs.view(-1), sums.view(-1), grad_out.ndim > 0
    scale = None if temperature is None else 1 / temperature
    options = ignore_index, scale, beta, probabilities or None, exact(x, y)
    if alone and scale is not None:
        sums = torch.empty_like(sums)
        kernels[0](x, y, labels, grad_out, None, logs, sums, None, None, *options, True, lanes_of(x))
    weight, alike = (grad_out, None) if alone else (None, grad_out.expand(1))
    kernels[2](x, y, labels, weight, alike, logs, sums, total, grad_x, grad_y, *options)
    return grad_x, grad_y

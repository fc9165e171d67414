"""Row-wise ops: all leading dimensions become one, M, in the order in which they lie in memory.

Softmax of a (sequence, batch, vocabulary) view of a (batch, sequence, vocabulary) tensor visits the rows in the storage's
order, without a copy. Only leading dimensions that no single stride describes are copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Shape(NamedTuple):
    """How to undo a flattening: the leading sizes in memory order, and the permutation to the caller's order."""

    sizes: tuple[int, ...]
    inverse: tuple[int, ...] | None


class Rows:
    """Flattens the row-wise tensors among named values; `trailing` says how many dimensions each keeps."""

    def __init__(self, trailing: Mapping[str, int], names: Sequence[str]) -> None:
        self.trailing = trailing
        spots = [(names.index(name), kept) for name, kept in trailing.items() if name in names]
        spots += [(names.index(f"grad_{name}"), kept) for name, kept in trailing.items() if f"grad_{name}" in names]
        self.spots = spots

    def flatten(self, values: Sequence[Any]) -> tuple[Sequence[Any], Shape | None]:
        """The values as kernels see them. The first row-wise tensor of the declaration says what the rows are."""
        if not self.spots:
            return values, None
        i, kept = self.spots[0]
        lead: Tensor = values[i]
        n = lead.ndim - kept
        if n == 1:
            return values, None
        order: list[int] | None = None
        if n > 1 and not lead.is_contiguous():
            order = sorted(range(n), key=lambda d: -lead.stride(d))
            order = None if order == list(range(n)) else order
        flat = list(values)
        for i, kept in self.spots:
            t = values[i]
            if isinstance(t, Tensor) and t.ndim == n + kept:
                t = t if order is None else t.permute(*order, *range(n, t.ndim))
                flat[i] = t.reshape(-1, *t.shape[n:])
        if order is None:
            return flat, Shape(tuple(lead.shape[:n]), None)
        inverse = tuple(order.index(d) for d in range(n))
        return flat, Shape(tuple(lead.shape[d] for d in order), inverse)

    def restore(self, name: str, t: Tensor, shape: Shape | None) -> Tensor:
        """The result `name` of a kernel in the caller's shape."""
        if shape is None or name not in self.trailing or t.ndim == 0:
            return t
        t = t.view((*shape.sizes, *t.shape[1:]))
        if shape.inverse is None:
            return t
        return t.permute(*shape.inverse, *range(len(shape.inverse), t.ndim))

"""Inputs for tests and benchmarks."""

import torch
from torch import Tensor


class Draw:
    """Draws tensors on one device: `draw(4, 8)` is normal, in the dtype under test. On `meta` only shapes are made."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.generator = None if self.device.type == "meta" else torch.Generator(self.device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        # Half types are drawn as such: a float32 copy of the largest workloads would not fit beside them.
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

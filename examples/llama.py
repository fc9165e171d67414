"""A Llama-style decoder whose ops are an argument: `Llama(SIZES["tiny"], kernels_helion)`.

The ops are a module, or any namespace, with those of `OPS`; `kernels_helion`, `kernels_triton` and `kernels_reference` are
such modules. Queries and keys are normalised, as in Qwen 3. Projections that read the same input are one matrix, so the ops
get views: qk_norm_rope the heads of a fused query-key-value projection, swiglu a gate and an up half side by side.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OPS = ("rms_norm", "add_rms_norm", "qk_norm_rope", "swiglu", "linear_cross_entropy")


def load_ops(name: str) -> Any:
    """The ops called "helion", "triton" or "liger", or as "eager" what a user would write today, as each declaration says."""
    if name == "liger":  # The peer that the benchmarks know, under the same signatures.
        spec: Any = importlib.util.spec_from_file_location("peers", Path(__file__).parent.parent / "bench/_peers.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if name != "eager":
        return importlib.import_module(f"kernels_{name}")
    declared = {name: importlib.import_module(f"kernels_reference.{name}").op for name in OPS}
    return SimpleNamespace(**{name: op.eager or op.fn for name, op in declared.items()})


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder; each attention head is `dim // heads` wide."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 256
    length: int = 2048
    """The most positions of a sequence."""
    theta: float = 500_000.0
    eps: float = 1e-5
    dtype: torch.dtype = torch.float32
    """Of activations and matrices. The weights of norms are float32: near one, bfloat16 loses an optimizer's small steps."""


SIZES = {
    "tiny": Config(dim=128, layers=4, heads=4, kv_heads=2, ffn=384),
    "small": Config(dim=768, layers=12, heads=12, kv_heads=4, ffn=2048),
    # Llama 3.2 1B: 1.24 B parameters with its vocabulary of 128256, and 0.97 B with one of bytes.
    "1b": Config(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192),
}


class Attention(nn.Module):
    def __init__(self, config: Config, ops: Any) -> None:
        super().__init__()
        self.ops, self.eps, self.width = ops, config.eps, config.dim // config.heads
        self.heads = [config.heads, config.kv_heads, config.kv_heads]
        self.qkv = nn.Linear(config.dim, sum(self.heads) * self.width, bias=False, dtype=config.dtype)
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(self.width)) for _ in range(2))
        self.out = nn.Linear(config.dim, config.dim, bias=False, dtype=config.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2).split(self.heads, dim=1)
        q, k = self.ops.qk_norm_rope(q, k, self.q_norm, self.k_norm, cos, sin, self.eps)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config, ops: Any) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn, bias=False, dtype=config.dtype)
        self.out = nn.Linear(config.ffn, config.dim, bias=False, dtype=config.dtype)

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        return self.out(self.ops.swiglu(self.gate_up(x)))


class Llama(nn.Module):
    """The decoder, with one matrix as token embedding and as output projection."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, ops: Any) -> None:
        super().__init__()
        self.ops, self.eps = ops, config.eps
        self.embedding = nn.Embedding(config.vocab, config.dim, dtype=config.dtype)
        self.branches = nn.ModuleList(kind(config, ops) for _ in range(config.layers) for kind in (Attention, FeedForward))
        # One before each branch, and one before the output.
        self.norms = nn.ParameterList(torch.ones(config.dim) for _ in range(2 * config.layers + 1))
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # The two branches of each block add up: smaller outputs keep the sum as large in a deep model.
                nn.init.normal_(p, std=(p.shape[1] * (2 * config.layers if name.endswith("out.weight") else 1)) ** -0.5)
        width = config.dim // config.heads
        frequencies = config.theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.outer(torch.arange(config.length, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(config.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(config.dtype), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, a float32 scalar, of `targets` (batch, length) that follow `tokens` (batch, length)."""
        stream = self.embedding(tokens)
        angles = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.ops.rms_norm(stream, self.norms[0], self.eps)
        for i, branch in enumerate(self.branches, 1):
            x, stream = self.ops.add_rms_norm(branch(x, *angles), stream, self.norms[i], self.eps)
        return self.ops.linear_cross_entropy(x, self.embedding.weight, targets, dtype=torch.float32)

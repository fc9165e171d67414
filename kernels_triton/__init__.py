"""The ops in hand-written Triton."""

from .softmax import softmax
from .swiglu import swiglu

__all__ = ["softmax", "swiglu"]

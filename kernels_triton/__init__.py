"""The ops in hand-written Triton."""

from .softmax import softmax

__all__ = ["softmax"]

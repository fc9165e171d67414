"""The ops in Helion."""

from .softmax import softmax

__all__ = ["softmax"]

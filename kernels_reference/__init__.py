"""What each op means: plain PyTorch definitions, and the declarations that backends, tests and benchmarks read."""

from .softmax import softmax
from .swiglu import swiglu

__all__ = ["softmax", "swiglu"]

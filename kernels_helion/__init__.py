"""The ops in Helion."""

from . import _kernel as _kernel  # First: it says which versions work, where Helion fails to import.
from .softmax import softmax
from .swiglu import swiglu

__all__ = ["softmax", "swiglu"]

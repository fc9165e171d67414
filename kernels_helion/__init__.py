"""The ops in Helion."""

from . import _kernel as _kernel  # First: it says which versions work, where Helion fails to import.
from .cross_entropy import cross_entropy
from .log_softmax import log_softmax
from .rms_norm import rms_norm
from .rope import rope
from .softmax import softmax
from .swiglu import swiglu

__all__ = ["cross_entropy", "log_softmax", "rms_norm", "rope", "softmax", "swiglu"]

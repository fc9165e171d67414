"""What each op means: plain PyTorch definitions, and the declarations that backends, tests and benchmarks read."""

from .cross_entropy import cross_entropy
from .log_softmax import log_softmax
from .rms_norm import rms_norm
from .rope import rope
from .softmax import softmax
from .swiglu import swiglu

__all__ = ["cross_entropy", "log_softmax", "rms_norm", "rope", "softmax", "swiglu"]

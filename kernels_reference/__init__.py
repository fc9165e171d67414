"""What each op means: plain PyTorch definitions, and the declarations that backends, tests and benchmarks read."""

from .add_layer_norm import add_layer_norm
from .add_rms_norm import add_rms_norm
from .cross_entropy import cross_entropy
from .dropout import dropout
from .dropout_add import dropout_add
from .embedding import embedding
from .geglu import geglu
from .group_norm import group_norm
from .jsd import jsd
from .kl_div import kl_div
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .log_softmax import log_softmax
from .qk_norm_rope import qk_norm_rope
from .rms_norm import rms_norm
from .rope import rope
from .softmax import softmax
from .swiglu import swiglu

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "dropout",
    "dropout_add",
    "embedding",
    "geglu",
    "group_norm",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
]

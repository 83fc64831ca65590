"""Preconditioned attention: one library, every mechanism, any array.

>>> import numpy as np, precondattn as pa
>>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 4, 8))
>>> pa.lucid(q, k, v).shape
(2, 6, 4, 8)
"""

from precondattn.backend import (
    ArraySpec,
    Backend,
    PassedOverWarning,
    Request,
    Support,
    UnsupportedError,
)
from precondattn.cache import Append, Cache
from precondattn.declaration import ShapeError
from precondattn.discovery import register_backend, unregister_backend, use_backend
from precondattn.expression import parse
from precondattn.frame import Frame
from precondattn.group import group_of
from precondattn.mechanism import Leaf, Mechanism, Offers, Preconditioner, Step, TokenWise, step
from precondattn.preconditioners import Laser, Lucid
from precondattn.registry import mechanisms
from precondattn.shorthands import laser, lucid, softmax
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.rms_norm import RMSNorm
from precondattn.spec.softmax import Softmax

__version__ = "0.1.0"

__all__ = [
    "Append",
    "ArraySpec",
    "Backend",
    "Cache",
    "Frame",
    "Laser",
    "Leaf",
    "Lucid",
    "LucidSolve",
    "Mechanism",
    "Offers",
    "PassedOverWarning",
    "Preconditioner",
    "RMSNorm",
    "Request",
    "ShapeError",
    "Softmax",
    "Step",
    "Support",
    "TokenWise",
    "UnsupportedError",
    "group_of",
    "laser",
    "lucid",
    "mechanisms",
    "parse",
    "register_backend",
    "softmax",
    "step",
    "unregister_backend",
    "use_backend",
]

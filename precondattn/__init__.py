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
from precondattn.cache import Append, Cache, Replace, Rewrite
from precondattn.declaration import ShapeError
from precondattn.discovery import register_backend, unregister_backend, use_backend
from precondattn.expression import parse
from precondattn.frame import Frame
from precondattn.group import group_of
from precondattn.head_pairs import pair_values, split_heads
from precondattn.mechanism import Leaf, Mechanism, Offers, Preconditioner, Step, TokenWise, step
from precondattn.preconditioners import (
    Differential,
    Laser,
    Lucid,
    PerDimScale,
    QKNorm,
    RowNormalized,
    Temperature,
)
from precondattn.registry import mechanisms
from precondattn.shorthands import (
    differential,
    laser,
    lucid,
    path,
    per_dim_scale,
    qk_norm,
    row_normalized,
    softmax,
    temperature,
)
from precondattn.spec.difference import Difference
from precondattn.spec.layer_norm import LayerNorm
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.path import Path
from precondattn.spec.rms_norm import RMSNorm
from precondattn.spec.scaled_dims import ScaledDims
from precondattn.spec.softmax import Softmax
from precondattn.spec.tempered import Tempered
from precondattn.spec.unit_rows import UnitRows

__version__ = "0.1.0"

__all__ = [
    "Append",
    "ArraySpec",
    "Backend",
    "Cache",
    "Difference",
    "Differential",
    "Frame",
    "Laser",
    "LayerNorm",
    "Leaf",
    "Lucid",
    "LucidSolve",
    "Mechanism",
    "Offers",
    "PassedOverWarning",
    "Path",
    "PerDimScale",
    "Preconditioner",
    "QKNorm",
    "RMSNorm",
    "Replace",
    "Request",
    "Rewrite",
    "RowNormalized",
    "ScaledDims",
    "ShapeError",
    "Softmax",
    "Step",
    "Support",
    "Temperature",
    "Tempered",
    "TokenWise",
    "UnitRows",
    "UnsupportedError",
    "differential",
    "group_of",
    "laser",
    "lucid",
    "mechanisms",
    "pair_values",
    "parse",
    "path",
    "per_dim_scale",
    "qk_norm",
    "register_backend",
    "row_normalized",
    "softmax",
    "split_heads",
    "step",
    "temperature",
    "unregister_backend",
    "use_backend",
]

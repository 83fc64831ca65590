"""Preconditioned attention: one library, every mechanism, any array.

>>> import numpy as np, precondattn as pa
>>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 4, 8))
>>> pa.lucid(q, k, v).shape
(2, 6, 4, 8)
"""

from precondattn import diagnostics
from precondattn.algebra import (
    Flops,
    Inputs,
    Leaf,
    Mechanism,
    Offers,
    Preconditioner,
    Recurrence,
    ShapeError,
    Step,
    TokenWise,
    options,
    step,
)
from precondattn.algebra.group import group_of
from precondattn.algebra.mechanism import mechanisms, parse
from precondattn.algebra.registry import unregister as unregister_mechanism
from precondattn.arrays import namespace
from precondattn.backend import (
    CONVENTIONS,
    ArraySpec,
    Backend,
    GatheredWarning,
    NotCheckedWarning,
    PassedOverWarning,
    Request,
    Runner,
    Support,
    UnsupportedError,
)
from precondattn.by_autograd import DifferentiableRunner
from precondattn.cache import Append, Cache, Replace, Rewrite, Slot, Snapshot
from precondattn.diagnostics.alignment import alignment, alignment_gap
from precondattn.dispatch.discovery import register_backend, unregister_backend, use_backend
from precondattn.execution.checked import checked
from precondattn.execution.shorthand import shorthand
from precondattn.frame import Frame
from precondattn.frameworks.ordinary import ordinary_operators
from precondattn.interop import mamba2, mamba2_inputs, pair_values, split_heads
from precondattn.parallel.partial_attention import merge, with_lse, with_lse_vjp
from precondattn.preconditioners.atk import ATK
from precondattn.preconditioners.bidirectional import Bidirectional
from precondattn.preconditioners.ccq import CCQ
from precondattn.preconditioners.differential import Differential
from precondattn.preconditioners.feature_map import Elu1, Hedgehog
from precondattn.preconditioners.laser import Laser
from precondattn.preconditioners.lucid import Lucid
from precondattn.preconditioners.mesa import Mesa
from precondattn.preconditioners.per_dim_scale import PerDimScale
from precondattn.preconditioners.qk_norm import QKNorm
from precondattn.preconditioners.row_normalized import RowNormalized
from precondattn.preconditioners.stable_step import StableStep
from precondattn.preconditioners.temperature import Temperature
from precondattn.spec import array_functions
from precondattn.spec.both_directions import BothDirections
from precondattn.spec.channel import Channel
from precondattn.spec.comba import Comba
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.contraction_gate import ContractionGate
from precondattn.spec.cross_covariance import CrossCovariance
from precondattn.spec.delta import KDA, Delta, GatedDelta
from precondattn.spec.delta_product import DeltaProduct
from precondattn.spec.deltaformer import DeltaFormer
from precondattn.spec.difference import Difference
from precondattn.spec.dplr import DPLR
from precondattn.spec.elu_plus_one import EluPlusOne
from precondattn.spec.erase_key import ErasingDelta, ErasingGatedDelta, ErasingGDN2, ErasingKDA
from precondattn.spec.gdn2 import GDN2
from precondattn.spec.gla import GLA, HGRN2
from precondattn.spec.gsa import GSA
from precondattn.spec.hedgehog import HedgehogMap
from precondattn.spec.l2_norm import L2Norm
from precondattn.spec.layer_norm import LayerNorm
from precondattn.spec.linear import Linear
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.mesa_query import MesaQuery
from precondattn.spec.mlstm import MLSTM
from precondattn.spec.nystrom import Nystrom
from precondattn.spec.outlook import Outlook
from precondattn.spec.own_token import OwnToken
from precondattn.spec.path import Path
from precondattn.spec.positive_definite import NotSolvedError
from precondattn.spec.preconditioned_key import PreconditionedKey
from precondattn.spec.query_weighted import QueryWeightedQuery
from precondattn.spec.recurrence import RECURRENT, Form, Stream
from precondattn.spec.retention import Retention
from precondattn.spec.reversed_tokens import ReversedTokens
from precondattn.spec.rms_norm import RMSNorm
from precondattn.spec.rwkv6 import RWKV6
from precondattn.spec.scaled_dims import ScaledDims
from precondattn.spec.softmax import Softmax
from precondattn.spec.ssd import SSD
from precondattn.spec.stable_strength import StableBeta, StableChannels
from precondattn.spec.stateful import Stateful
from precondattn.spec.symmetric_lucid import SymmetricLucidSolve
from precondattn.spec.tempered import Tempered
from precondattn.spec.unit_rows import UnitRows
from precondattn.spec.whole_sequence import WholeSequence
from precondattn.spec.windowed import Windowed

# The shorthands are made from the classes that are imported above.
# isort: split
from precondattn import shorthands
from precondattn.shorthands import *  # noqa: F403
from precondattn.version import __version__ as __version__


def __getattr__(name: str) -> object:
    """Raise an error that gives the expression for another library's name of a mechanism."""
    from precondattn.algebra.text import attribute_elsewhere

    hint = "" if name.startswith("_") else attribute_elsewhere(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


__all__ = [
    "ATK",
    "CCQ",
    "CONVENTIONS",
    "DPLR",
    "GDN2",
    "GLA",
    "GSA",
    "HGRN2",
    "KDA",
    "MLSTM",
    "RECURRENT",
    "RWKV6",
    "SSD",
    "Append",
    "ArraySpec",
    "Backend",
    "Bidirectional",
    "BothDirections",
    "Cache",
    "Channel",
    "Comba",
    "ConditionedQuery",
    "ContractionGate",
    "CrossCovariance",
    "Delta",
    "DeltaFormer",
    "DeltaProduct",
    "Difference",
    "DifferentiableRunner",
    "Differential",
    "Elu1",
    "EluPlusOne",
    "ErasingDelta",
    "ErasingGDN2",
    "ErasingGatedDelta",
    "ErasingKDA",
    "Flops",
    "Form",
    "Frame",
    "GatedDelta",
    "GatheredWarning",
    "Hedgehog",
    "HedgehogMap",
    "Inputs",
    "L2Norm",
    "Laser",
    "LayerNorm",
    "Leaf",
    "Linear",
    "LinearFamily",
    "Lucid",
    "LucidSolve",
    "Mechanism",
    "Mesa",
    "MesaQuery",
    "NotCheckedWarning",
    "NotSolvedError",
    "Nystrom",
    "Offers",
    "Outlook",
    "OwnToken",
    "PassedOverWarning",
    "Path",
    "PerDimScale",
    "PreconditionedKey",
    "Preconditioner",
    "QKNorm",
    "QueryWeightedQuery",
    "RMSNorm",
    "Recurrence",
    "Replace",
    "Request",
    "Retention",
    "ReversedTokens",
    "Rewrite",
    "RowNormalized",
    "Runner",
    "ScaledDims",
    "ShapeError",
    "Slot",
    "Snapshot",
    "Softmax",
    "StableBeta",
    "StableChannels",
    "StableStep",
    "Stateful",
    "Step",
    "Stream",
    "Support",
    "SymmetricLucidSolve",
    "Temperature",
    "Tempered",
    "TokenWise",
    "UnitRows",
    "UnsupportedError",
    "WholeSequence",
    "Windowed",
    "alignment",
    "alignment_gap",
    "array_functions",
    "checked",
    "diagnostics",
    "group_of",
    "mamba2",
    "mamba2_inputs",
    "mechanisms",
    "merge",
    "namespace",
    "options",
    "ordinary_operators",
    "pair_values",
    "parse",
    "register_backend",
    "shorthand",
    "split_heads",
    "step",
    "unregister_backend",
    "unregister_mechanism",
    "use_backend",
    "with_lse",
    "with_lse_vjp",
]
__all__ += shorthands.__all__

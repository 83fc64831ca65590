"""Preconditioned attention: one library, every mechanism, any array.

>>> import numpy as np, precondattn as pa
>>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 4, 8))
>>> pa.lucid(q, k, v).shape
(2, 6, 4, 8)
"""

from precondattn import diagnostics
from precondattn.algebra import options
from precondattn.algebra.declaration import Inputs, ShapeError
from precondattn.algebra.flops import Flops
from precondattn.algebra.group import group_of
from precondattn.algebra.mechanism import (
    Leaf,
    Mechanism,
    Preconditioner,
    Step,
    TokenWise,
    mechanisms,
    parse,
    step,
)
from precondattn.algebra.offers import Offers
from precondattn.algebra.recurrence import Recurrence
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
from precondattn.interop.head_pairs import pair_values, split_heads
from precondattn.interop.mamba2 import mamba2, mamba2_inputs
from precondattn.parallel.partial_attention import merge, with_lse, with_lse_vjp
from precondattn.preconditioners import (
    ATK,
    CCQ,
    Bidirectional,
    Differential,
    Elu1,
    Hedgehog,
    Laser,
    Lucid,
    Mesa,
    PerDimScale,
    QKNorm,
    RowNormalized,
    StableStep,
    Temperature,
)
from precondattn.spec import array_functions
from precondattn.spec.both_directions import BothDirections
from precondattn.spec.channel import Channel
from precondattn.spec.comba import Comba
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.contraction_gate import ContractionGate
from precondattn.spec.cross_covariance import CrossCovariance
from precondattn.spec.delta import Delta, GatedDelta
from precondattn.spec.delta_product import DeltaProduct
from precondattn.spec.deltaformer import DeltaFormer
from precondattn.spec.difference import Difference
from precondattn.spec.dplr import DPLR
from precondattn.spec.elu_plus_one import EluPlusOne
from precondattn.spec.erase_key import ErasingDelta, ErasingGatedDelta, ErasingGDN2, ErasingKDA
from precondattn.spec.gdn2 import GDN2
from precondattn.spec.gla import GLA
from precondattn.spec.gsa import GSA
from precondattn.spec.hedgehog import HedgehogMap
from precondattn.spec.hgrn2 import HGRN2
from precondattn.spec.kda import KDA
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
from precondattn.shorthands import (
    atk,
    bidirectional,
    ccq,
    channel,
    comba,
    contraction_gate,
    cross_covariance,
    delta,
    delta_product,
    deltaformer,
    differential,
    dplr,
    elu1,
    gated_delta,
    gdn2,
    gla,
    gsa,
    hedgehog,
    hgrn2,
    kda,
    laser,
    linear,
    lucid,
    mesa,
    mlstm,
    nystrom,
    outlook,
    path,
    per_dim_scale,
    qk_norm,
    retention,
    row_normalized,
    rwkv6,
    softmax,
    ssd,
    stable_step,
    temperature,
    windowed,
)
from precondattn.version import __version__ as __version__


def __getattr__(name: str) -> object:
    """Raise an error that gives the expression for another library's name of a mechanism."""
    from precondattn.algebra.given_mechanism import attribute_elsewhere

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
    "atk",
    "bidirectional",
    "ccq",
    "channel",
    "checked",
    "comba",
    "contraction_gate",
    "cross_covariance",
    "delta",
    "delta_product",
    "deltaformer",
    "diagnostics",
    "differential",
    "dplr",
    "elu1",
    "gated_delta",
    "gdn2",
    "gla",
    "group_of",
    "gsa",
    "hedgehog",
    "hgrn2",
    "kda",
    "laser",
    "linear",
    "lucid",
    "mamba2",
    "mamba2_inputs",
    "mechanisms",
    "merge",
    "mesa",
    "mlstm",
    "namespace",
    "nystrom",
    "options",
    "ordinary_operators",
    "outlook",
    "pair_values",
    "parse",
    "path",
    "per_dim_scale",
    "qk_norm",
    "register_backend",
    "retention",
    "row_normalized",
    "rwkv6",
    "shorthand",
    "softmax",
    "split_heads",
    "ssd",
    "stable_step",
    "step",
    "temperature",
    "unregister_backend",
    "unregister_mechanism",
    "use_backend",
    "windowed",
    "with_lse",
    "with_lse_vjp",
]

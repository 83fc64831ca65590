"""The preconditioners, one per file: its steps, and the reasons why it refuses some bases.

Their mathematics is in `spec/`, one file per leaf.
"""

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

__all__ = [
    "ATK",
    "CCQ",
    "Bidirectional",
    "Differential",
    "Elu1",
    "Hedgehog",
    "Laser",
    "Lucid",
    "Mesa",
    "PerDimScale",
    "QKNorm",
    "RowNormalized",
    "StableStep",
    "Temperature",
]

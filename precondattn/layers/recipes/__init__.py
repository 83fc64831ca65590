"""Recipes, and the published ones for each mechanism (`published.py`)."""

from precondattn.layers.recipes.differential import (
    DifferenceNorm,
    LambdaOfToken,
    LambdaOfVectors,
)
from precondattn.layers.recipes.gates import (
    DecayOfStep,
    DecayWithBias,
    LogSigmoid,
    LowRankLogSigmoid,
    Sigmoid,
    StepOfSolve,
    StepSize,
    Written,
)
from precondattn.layers.recipes.learned import Learned, LearnedIdentity, Positive
from precondattn.layers.recipes.outputs import (
    Activated,
    Biased,
    GatedGroupNorm,
    GatedNorm,
    Norm,
    Unchanged,
)
from precondattn.layers.recipes.projections import (
    Activation,
    Contraction,
    Convolution,
    Direction,
    NormedRotary,
    Projection,
    Rotary,
    Stepped,
    UnitConvolution,
    Weighted,
)
from precondattn.layers.recipes.published import CCQ_SIZES, MESANET, recipes_for

__all__ = [
    "CCQ_SIZES",
    "MESANET",
    "Activated",
    "Activation",
    "Biased",
    "Contraction",
    "Convolution",
    "DecayOfStep",
    "DecayWithBias",
    "DifferenceNorm",
    "Direction",
    "GatedGroupNorm",
    "GatedNorm",
    "LambdaOfToken",
    "LambdaOfVectors",
    "Learned",
    "LearnedIdentity",
    "LogSigmoid",
    "LowRankLogSigmoid",
    "Norm",
    "NormedRotary",
    "Positive",
    "Projection",
    "Rotary",
    "Sigmoid",
    "StepOfSolve",
    "StepSize",
    "Stepped",
    "Unchanged",
    "UnitConvolution",
    "Weighted",
    "Written",
    "recipes_for",
]

"""The published recipes: for each leaf, by its own names of its inputs.

`out` is the recipe of the output. A name that is no input of the leaf is a helper, a value that
other recipes read; it has the shape of the input after the slash: `"dt/g"`. A leaf with options,
such as `linear[normalize=true]`, is looked up by its whole text first.
"""

from __future__ import annotations

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes.comba import (
    CorrectedQuery,
    InnerDecay,
    UnitEraseKey,
    UnitKey,
)
from precondattn.layers.recipes.differential import (
    DifferenceNorm,
    LambdaOfToken,
    LambdaOfVectors,
)
from precondattn.layers.recipes.distances import AlibiSlopes
from precondattn.layers.recipes.gates import (
    DecayOfStep,
    DecayWithBias,
    LogSigmoid,
    LowRankDecay,
    LowRankLogSigmoid,
    Sigmoid,
    StepOfSolve,
    StepSize,
    Written,
)
from precondattn.layers.recipes.hgrn2 import BoundedLogSigmoid, NormOfHeads
from precondattn.layers.recipes.learned import (
    Learned,
    LearnedIdentity,
    LearnedNoise,
    Positive,
    Ridge,
)
from precondattn.layers.recipes.outputs import (
    Activated,
    GatedGroupNorm,
    GatedNorm,
    LowRankGatedNorm,
    Norm,
    SigmoidGatedNorm,
    Unchanged,
)
from precondattn.layers.recipes.projections import (
    Activation,
    Contraction,
    Convolution,
    Direction,
    Projection,
    Rotary,
    Stepped,
    UnitConvolution,
    Weighted,
)
from precondattn.layers.recipes.rwkv6 import DecayMixedByToken, GatedHeadNorm, MixedByToken
from precondattn.layers.recipes.rwkv7 import (
    BonusGroupNorm,
    Mixed,
    MixedDecay,
    MixedGate,
    MixedLowRank,
    NegativeKey,
    RemovalKey,
    ReplacementKey,
    ScaledKey,
)
from precondattn.layers.recipes.xlstm import (
    CappedGate,
    CappedLogSigmoid,
    SigmoidGatedLayerNorm,
)

Recipes = dict[str, Recipe]

ROWS: Recipes = {"q": Projection(), "k": Projection(), "v": Projection()}
WITHOUT_ROTATION: Recipes = {**ROWS, "g": LogSigmoid(), "sink": Learned()}
"""The recipes of softmax attention whose scores already depend on positions."""

DELTA: Recipes = {
    "q": UnitConvolution(),
    "k": UnitConvolution(),
    "v": Convolution(),
    "beta": Sigmoid(),
}
OF_VECTORS: Recipes = {"lam": LambdaOfVectors(), "out": DifferenceNorm()}
CONTRACTION: Recipes = {"contraction": Contraction()}
GAIN: Recipes = {"gain": Learned(1.0)}

GATED_DELTA: Recipes = {**DELTA, "g": DecayWithBias(), "out": GatedNorm()}
KDA: Recipes = {**DELTA, "g": LowRankDecay(), "out": LowRankGatedNorm()}
GDN2: Recipes = {
    "q": UnitConvolution(),
    "k": UnitConvolution(),
    "v": Convolution(),
    "g": LowRankDecay(),
    "b": Sigmoid(),
    "w": Sigmoid(),
    "out": LowRankGatedNorm(),
}

PUBLISHED: dict[str, Recipes] = {
    "softmax": {
        "q": Rotary(),
        "k": Rotary(),
        "v": Projection(),
        "g": LogSigmoid(),
        "sink": Learned(),
    },
    "softmax[distance=slopes]": {**WITHOUT_ROTATION, "slopes": AlibiSlopes()},
    "softmax[distance=buckets]": {**WITHOUT_ROTATION, "bucket_table": LearnedNoise()},
    "path": {
        **ROWS,
        "w": Direction(),
        "beta": Sigmoid(2.0, bias=True),
        "g": LogSigmoid(),
        "sink": Learned(),
    },
    "deltaformer": {
        "q": Rotary(),
        "k": Rotary(),
        "v": Projection(),
        "beta": Sigmoid(bias=True),
    },
    "channel": ROWS,
    "cross_covariance": {**ROWS, "logit_scale": Learned(1.0)},
    "nystrom": {**ROWS, "skip": LearnedNoise()},
    "outlook": {"logits": Projection(bias=True), "v": Projection()},
    "windowed": {**ROWS, "bias_table": LearnedNoise()},
    "linear": {**ROWS, "out": Norm()},
    "linear[normalize=true]": ROWS,
    "retention": {"q": Rotary(), "k": Rotary(), "v": Projection(), "out": GatedNorm()},
    "gla": {**ROWS, "g": LowRankLogSigmoid(), "out": GatedNorm()},
    "hgrn2": {
        "q": Activation(),
        "v": Projection(),
        "g": BoundedLogSigmoid(),
        "out": NormOfHeads(),
    },
    "rwkv6": {
        "gate/v": MixedByToken(),
        "q": MixedByToken(),
        "k": MixedByToken(),
        "v": MixedByToken(),
        "g": DecayMixedByToken(),
        "u": Learned(),
        "out": GatedHeadNorm(),
    },
    "delta": {**DELTA, "out": Norm()},
    "gated_delta": GATED_DELTA,
    "kda": KDA,
    "gdn2": GDN2,
    "comba": {
        "raw/k": Convolution(),
        "shortened/p": InnerDecay(),
        "q": CorrectedQuery(),
        "k": UnitKey(),
        "p": UnitEraseKey(),
        "v": Convolution(),
        "g": DecayWithBias(),
        "beta": Sigmoid(),
        "out": SigmoidGatedNorm(),
    },
    "ssd": {
        "q": Convolution(bias=True),
        "k": Convolution(bias=True),
        "x/v": Convolution(bias=True),
        "dt/g": StepSize(),
        "v": Stepped(),
        "g": DecayOfStep(),
        "out": GatedGroupNorm(),
    },
    "gsa": {
        "q": Activation(),
        "k": Activation(),
        "v": Activation(),
        "g": LogSigmoid(8.0, bias=False),
        "s": Written(),
        "out": Activated(),
    },
    "mlstm": {
        **ROWS,
        "g": CappedLogSigmoid(),
        "i": CappedGate(),
        "out": SigmoidGatedLayerNorm(),
    },
    "delta_product": GATED_DELTA,
    "dplr": {
        "raw/k": Mixed(),
        "rate/a": MixedLowRank(),
        "kappa/a": RemovalKey(),
        "gate/v": MixedGate(),
        "q": Mixed(),
        "k": ReplacementKey(),
        "v": Mixed(),
        "a": NegativeKey(),
        "b": ScaledKey(),
        "g": MixedDecay(),
        "out": BonusGroupNorm(),
    },
    "erasing_delta": {**DELTA, "out": Norm()},
    "erasing_gated_delta": GATED_DELTA,
    "erasing_kda": KDA,
    "erasing_gdn2": GDN2,
    "preconditioned_key": {
        "k": UnitConvolution(),
        "g_atk": DecayWithBias(),
        "beta_atk": Sigmoid(),
        "log_atk_scale": Learned(-0.2),
    },
    "stable_beta": {"k": Convolution(), "beta": Sigmoid()},
    "stable_channels": {"k": Convolution(), "b": Sigmoid(), "w": Sigmoid()},
    "lucid_solve": {"lucid_beta": StepOfSolve()},
    "mesa_query": {
        "q": UnitConvolution(),
        "k": UnitConvolution(),
        "beta_mesa": Sigmoid(),
        "lam_mesa": Ridge(),
    },
    "conditioned_query": CONTRACTION,
    "query_weighted_query": CONTRACTION,
    "difference": OF_VECTORS,
    "difference[per=token]": {"lam": LambdaOfToken(), "out": Unchanged()},
    "hedgehog_map": {"weight": LearnedIdentity(), "bias": Learned()},
    "tempered": {"tau": Positive()},
    "scaled_dims": {"per_dim": Learned()},
    "rms_norm": GAIN,
    "layer_norm": GAIN,
    "l2_norm": GAIN,
}


MESANET: Recipes = {
    "q": UnitConvolution(),
    "k": UnitConvolution(),
    "v": Weighted(),
    "g": LogSigmoid(),
    "beta_mesa": Sigmoid(bias=True),
    "out": Norm(),
}
"""The recipes of `mesa[beta=true](ssd)` in MesaNet, which differ from those of `ssd` in Mamba-2."""

CCQ_SIZES = {"head_dim": 256, "value_dim": 512}
"""The head widths of CCQ's models, for both backbones (arXiv 2606.01294, Appendix D)."""


def recipes_for(leaf: LeafProtocol) -> Recipes:
    """The published recipes of a leaf, by input name; empty for an unknown leaf."""
    positions = f"{leaf.name}[distance={getattr(leaf, 'distance', 'none')}]"
    known = [PUBLISHED[name] for name in (str(leaf), positions, leaf.name) if name in PUBLISHED]
    return known[0] if known else {}

"""The published recipes: for each leaf, by its own names of its inputs.

`out` is the recipe of the output. A name that is no input of the leaf is a helper, a value that
other recipes read; it has the shape of the input after the slash: `"dt/g"`. A leaf with options,
such as `linear[normalize=true]`, is looked up by its whole text first.
"""

from __future__ import annotations

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.layers.recipe import Recipe
from precondattn.layers.recipes import (
    comba,
    differential,
    gates,
    learned,
    outputs,
    projections,
    rwkv6,
    rwkv7,
    xlstm,
)

Recipes = dict[str, Recipe]

ROWS: Recipes = {
    "q": projections.Projection(),
    "k": projections.Projection(),
    "v": projections.Projection(),
}
WITHOUT_ROTATION: Recipes = {**ROWS, "g": gates.LogSigmoid(), "sink": learned.Learned()}
"""The recipes of softmax attention whose scores already depend on positions."""

ROTATED: Recipes = {**ROWS, "q": projections.Rotary(), "k": projections.Rotary()}
UNIT: Recipes = {"q": projections.UnitConvolution(), "k": projections.UnitConvolution()}
DELTA: Recipes = {**UNIT, "v": projections.Convolution(), "beta": gates.Sigmoid()}
OF_VECTORS: Recipes = {"lam": differential.LambdaOfVectors(), "out": differential.DifferenceNorm()}
CONTRACTION: Recipes = {"contraction": projections.Contraction()}
GAIN: Recipes = {"gain": learned.Learned(1.0)}

GATED_DELTA: Recipes = {**DELTA, "g": gates.DecayWithBias(), "out": outputs.GatedNorm()}
KDA: Recipes = {**DELTA, "g": gates.LowRankDecay(), "out": outputs.LowRankGatedNorm()}
GDN2: Recipes = {
    **UNIT,
    "v": projections.Convolution(),
    "g": gates.LowRankDecay(),
    "b": gates.Sigmoid(),
    "w": gates.Sigmoid(),
    "out": outputs.LowRankGatedNorm(),
}

PUBLISHED: dict[str, Recipes] = {
    "softmax": {**WITHOUT_ROTATION, **ROTATED},
    "softmax[distance=slopes]": {**WITHOUT_ROTATION, "slopes": learned.AlibiSlopes()},
    "softmax[distance=buckets]": {**WITHOUT_ROTATION, "bucket_table": learned.LearnedNoise()},
    "path": {
        **WITHOUT_ROTATION,
        "w": projections.Direction(),
        "beta": gates.Sigmoid(2.0, bias=True),
    },
    "deltaformer": {**ROTATED, "beta": gates.Sigmoid(bias=True)},
    "channel": ROWS,
    "cross_covariance": {**ROWS, "logit_scale": learned.Learned(1.0)},
    "nystrom": {**ROWS, "skip": learned.LearnedNoise()},
    "outlook": {"logits": projections.Projection(bias=True), "v": projections.Projection()},
    "windowed": {**ROWS, "bias_table": learned.LearnedNoise()},
    "linear": {**ROWS, "out": outputs.Norm()},
    "linear[normalize=true]": ROWS,
    "retention": {**ROTATED, "out": outputs.GatedNorm()},
    "gla": {**ROWS, "g": gates.LowRankLogSigmoid(), "out": outputs.GatedNorm()},
    "hgrn2": {
        "q": projections.Activation(),
        "v": projections.Projection(),
        "g": gates.BoundedLogSigmoid(),
        "out": outputs.NormOfHeads(),
    },
    "rwkv6": {
        "gate/v": rwkv6.MixedByToken(),
        "q": rwkv6.MixedByToken(),
        "k": rwkv6.MixedByToken(),
        "v": rwkv6.MixedByToken(),
        "g": rwkv6.DecayMixedByToken(),
        "u": learned.Learned(),
        "out": rwkv6.GatedHeadNorm(),
    },
    "delta": {**DELTA, "out": outputs.Norm()},
    "gated_delta": GATED_DELTA,
    "kda": KDA,
    "gdn2": GDN2,
    "comba": {
        "raw/k": projections.Convolution(),
        "shortened/p": comba.InnerDecay(),
        "q": comba.CorrectedQuery(),
        "k": comba.UnitKey(),
        "p": comba.UnitEraseKey(),
        "v": projections.Convolution(),
        "g": gates.DecayWithBias(),
        "beta": gates.Sigmoid(),
        "out": outputs.SigmoidGatedNorm(),
    },
    "ssd": {
        "q": projections.Convolution(bias=True),
        "k": projections.Convolution(bias=True),
        "x/v": projections.Convolution(bias=True),
        "dt/g": gates.StepSize(),
        "v": projections.Stepped(),
        "g": gates.DecayOfStep(),
        "out": outputs.GatedGroupNorm(),
    },
    "gsa": {
        "q": projections.Activation(),
        "k": projections.Activation(),
        "v": projections.Activation(),
        "g": gates.LogSigmoid(8.0, bias=False),
        "s": gates.Written(),
        "out": outputs.Activated(),
    },
    "mlstm": {
        **ROWS,
        "g": xlstm.CappedLogSigmoid(),
        "i": xlstm.CappedGate(),
        "out": xlstm.SigmoidGatedLayerNorm(),
    },
    "delta_product": GATED_DELTA,
    "dplr": {
        "raw/k": rwkv7.Mixed(),
        "rate/a": rwkv7.MixedLowRank(),
        "kappa/a": rwkv7.RemovalKey(),
        "gate/v": rwkv7.MixedGate(),
        "q": rwkv7.Mixed(),
        "k": rwkv7.ReplacementKey(),
        "v": rwkv7.Mixed(),
        "a": rwkv7.NegativeKey(),
        "b": rwkv7.ScaledKey(),
        "g": rwkv7.MixedDecay(),
        "out": rwkv7.BonusGroupNorm(),
    },
    "erasing_delta": {**DELTA, "out": outputs.Norm()},
    "erasing_gated_delta": GATED_DELTA,
    "erasing_kda": KDA,
    "erasing_gdn2": GDN2,
    "preconditioned_key": {
        "k": projections.UnitConvolution(),
        "g_atk": gates.DecayWithBias(),
        "beta_atk": gates.Sigmoid(),
        "log_atk_scale": learned.Learned(-0.2),
    },
    "stable_beta": {"k": projections.Convolution(), "beta": gates.Sigmoid()},
    "stable_channels": {"k": projections.Convolution(), "b": gates.Sigmoid(), "w": gates.Sigmoid()},
    "lucid_solve": {"lucid_beta": gates.StepOfSolve()},
    "mesa_query": {
        **UNIT,
        "beta_mesa": gates.Sigmoid(),
        "lam_mesa": learned.Ridge(),
    },
    "conditioned_query": CONTRACTION,
    "query_weighted_query": CONTRACTION,
    "difference": OF_VECTORS,
    "difference[per=token]": {"lam": differential.LambdaOfToken(), "out": outputs.Unchanged()},
    "hedgehog_map": {"weight": learned.LearnedIdentity(), "bias": learned.Learned()},
    "tempered": {"tau": learned.Positive()},
    "scaled_dims": {"per_dim": learned.Learned()},
    "rms_norm": GAIN,
    "layer_norm": GAIN,
    "l2_norm": GAIN,
}


MESANET: Recipes = {
    **UNIT,
    "v": projections.Weighted(),
    "g": gates.LogSigmoid(),
    "beta_mesa": gates.Sigmoid(bias=True),
    "out": outputs.Norm(),
}
"""The recipes of `mesa[beta=true](ssd)` in MesaNet, which differ from those of `ssd` in Mamba-2."""

CCQ_SIZES = {"head_dim": 256, "value_dim": 512}
"""The head widths of CCQ's models, for both backbones (arXiv 2606.01294, Appendix D)."""


def recipes_for(leaf: LeafProtocol) -> Recipes:
    """The published recipes of a leaf, by input name; empty for an unknown leaf."""
    positions = f"{leaf.name}[distance={getattr(leaf, 'distance', 'none')}]"
    recipes = [PUBLISHED[name] for name in (str(leaf), positions, leaf.name) if name in PUBLISHED]
    return recipes[0] if recipes else {}

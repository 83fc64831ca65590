"""Judgements of red cells, made by hand, with a file for each project.

They are in the order of the page. Measured errors are not written here; the code prints them.
"""

from __future__ import annotations

from precondattn_conformance.ecosystem.judgement import Judgement
from precondattn_conformance.ecosystem.judgements import (
    ejkernel,
    fla,
    gated_delta_nets,
    haiku,
    jax,
    linear_attentions,
    mamba,
    mlstm,
    nystrom_attention,
    online_softmax,
    pytorch,
    timm,
    transformers,
    x_transformers,
)

JUDGEMENTS: tuple[Judgement, ...] = (
    *ejkernel.JUDGEMENTS,
    *fla.JUDGEMENTS,
    *gated_delta_nets.JUDGEMENTS,
    *haiku.JUDGEMENTS,
    *jax.JUDGEMENTS,
    *linear_attentions.JUDGEMENTS,
    *mamba.JUDGEMENTS,
    *mlstm.JUDGEMENTS,
    *nystrom_attention.JUDGEMENTS,
    *online_softmax.JUDGEMENTS,
    *pytorch.JUDGEMENTS,
    *timm.JUDGEMENTS,
    *transformers.JUDGEMENTS,
    *x_transformers.JUDGEMENTS,
)

"""Judgements of red cells, made by hand, with a file for each project.

They are in the order of the page. Measured errors are not written here; the code prints them.
"""

from __future__ import annotations

from importlib import import_module

from precondattn_conformance.ecosystem.judgement import Judgement

PROJECTS = (
    *("ejkernel", "fla", "gated_delta_nets", "haiku", "jax", "linear_attentions", "mamba", "mlstm"),
    *("nystrom_attention", "online_softmax", "pytorch", "timm", "transformers", "x_transformers"),
)

JUDGEMENTS: tuple[Judgement, ...] = tuple(
    judgement for name in PROJECTS for judgement in import_module(f"{__name__}.{name}").JUDGEMENTS
)

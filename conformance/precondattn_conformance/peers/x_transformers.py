"""x-transformers: `Attend`, by its own formula or by PyTorch's (`flash=True`).

Its own formula has a float32 softmax for every dtype.
"""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import HALF32, Foreign
from precondattn_conformance.peers.project import Project

X_TRANSFORMERS = Project(
    "x_transformers",
    "x-transformers",
    "https://github.com/lucidrains/x-transformers",
    package="x-transformers",
)
ALL = (X_TRANSFORMERS,)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    bias: Array | None,
    softcap: float | None = None,
    **options: Foreign,
) -> Array:
    if softcap is not None and bias is not None:
        raise ValueError("it caps the logits with their bias, and ours are capped before it")
    if softcap is not None:
        options |= {"softclamp_logits": True, "logit_softclamp_value": softcap}
    attend = X_TRANSFORMERS.imported("x_transformers.attend").Attend(**options)
    return attend(q, k, v, mask=mask, attn_bias=bias)[0]


@X_TRANSFORMERS.peer("softmax", layout="bhtd", dtypes=HALF32)
def attend_grouped(q: Array, k: Array, v: Array, causal: bool, scale: float | None) -> Array:
    return _attend(q, k, v, None, None, causal=causal, scale=scale)


@X_TRANSFORMERS.peer("softmax", layout="bhtd", heads="equal", dtypes=HALF32)
def attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
) -> Array:
    return _attend(q, k, v, visible, bias, softcap, scale=scale)


@X_TRANSFORMERS.peer("softmax", layout="bhtd", heads="equal", dtypes=HALF32)
def attend_causal(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    scale: float | None,
    key_mask: Array | None = None,
    bias: Array | None = None,
) -> Array:
    return _attend(q, k, v, key_mask, bias, causal=causal, scale=scale)


@X_TRANSFORMERS.peer("softmax", layout="bhtd", heads="equal")
def attend_flash(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    return _attend(q, k, v, visible, bias, scale=scale, flash=True)


@X_TRANSFORMERS.peer("softmax", layout="bhtd", heads="equal")
def attend_flash_causal(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    scale: float | None,
    key_mask: Array | None = None,
    bias: Array | None = None,
) -> Array:
    return _attend(q, k, v, key_mask, bias, causal=causal, scale=scale, flash=True)

"""x-transformers: `Attend`, by its own formula or by PyTorch's (`flash=True`).

Its own formula has a float32 softmax for every dtype.
"""

from __future__ import annotations

from functools import partial

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
    visible: Array | None = None,
    key_mask: Array | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    **options: Foreign,
) -> Array:
    if softcap is not None and bias is not None:
        raise ValueError("it caps the logits with their bias, and ours are capped before it")
    if softcap is not None:
        options |= {"softclamp_logits": True, "logit_softclamp_value": softcap}
    attend = X_TRANSFORMERS.imported("x_transformers.attend").Attend(**options)
    return attend(q, k, v, mask=key_mask if visible is None else visible, attn_bias=bias)[0]


EQUAL = {"heads": "equal"}
for _name, _options, _takes, _arrangement in (
    ("attend_grouped", {}, "causal=", {"dtypes": HALF32}),
    ("attend", {}, "visible= softcap= bias=?", {**EQUAL, "dtypes": HALF32}),
    ("attend_causal", {}, "causal= key_mask=? bias=?", {**EQUAL, "dtypes": HALF32}),
    ("attend_flash", {"flash": True}, "visible= bias=?", EQUAL),
    ("attend_flash_causal", {"flash": True}, "causal= key_mask=? bias=?", EQUAL),
):
    _load, _takes = partial(partial, _attend, **_options), f"q k v scale= {_takes}"
    X_TRANSFORMERS.direct(_name, "softmax", _load, _takes, layout="bhtd", **_arrangement)

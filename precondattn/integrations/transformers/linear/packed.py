"""Several texts in one row, which Transformers' own functions refuse as well."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.given import Given


def refuse_packed(kwargs: Mapping[str, Given]) -> None:
    """Raise an error if a call says that its rows hold several texts."""
    for name in ("cu_seqlens", "seq_idx"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: several texts packed into one row are not supported")

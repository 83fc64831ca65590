"""A case as data: one check, of one mechanism, on one library, dtype and kind of data.

gradients-torch-float32-block_and_one-clustered-lucid(path)
check     library dtype layout        keys      mechanism
"""

from __future__ import annotations

from dataclasses import dataclass

from precondattn_conformance.inputs import CallLayout


@dataclass(frozen=True)
class Case:
    """One check of one mechanism on one kind of data."""

    check: str
    mechanism: str
    library: str
    dtype: str
    layout: CallLayout
    kind: str

    @property
    def id(self) -> str:
        """Stable from version to version; `cases.case_of` reads it back."""
        parts = (self.check, self.library, self.dtype, self.layout.name, self.kind, self.mechanism)
        return "-".join(parts)

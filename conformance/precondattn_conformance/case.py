"""A case as data: a check, an array library, a dtype, a layout, a kind of keys and a mechanism.

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
        """The case's id, stable between versions; `cases.case_of` parses it."""
        parts = (self.check, self.library, self.dtype, self.layout.name, self.kind, self.mechanism)
        return "-".join(parts)

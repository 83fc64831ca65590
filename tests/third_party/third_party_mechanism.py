"""A third-party mechanism, discovered by an entry point."""

from dataclasses import dataclass
from typing import ClassVar

import precondattn as pa
from precondattn.algebra.declaration import Inputs


@dataclass(frozen=True)
class Doubled(pa.TokenWise):
    """o = 2 v."""

    name: ClassVar[str] = "doubled"
    role: ClassVar[str] = "base"
    inputs = Inputs(v="b s n e")
    output = "b s n e"

    def forward(self, x, frame):
        return 2 * x["v"], ()

    def backward(self, x, frame, out, residuals, cotangent):
        return {"v": 2 * cotangent}

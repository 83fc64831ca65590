"""The shorthands: `pa.softmax(q, k, v)`, and one for every other mechanism of the library.

A type checker reads them in `shorthands.pyi`, which `docs/make_shorthands.py` writes.
"""

from precondattn.algebra.expression import mechanisms
from precondattn.execution.shorthand import shorthand
from precondattn.spec.contraction_gate import ContractionGate

globals().update({cls.name: shorthand(cls) for cls in (*mechanisms().values(), ContractionGate)})

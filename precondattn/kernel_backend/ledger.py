"""The ledger of a backend: the kernels that have run on a GPU and agreed with the oracle.

It is the file `ledger.json` of a backend's package, written from saved runs. A kernel is chosen by
default only if an entry has everything that its `LedgerEntry` has at present.
"""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.options import fields_of
from precondattn.algebra.piece import Piece
from precondattn.backend import Request
from precondattn.kernel_backend.limits import padded_width

FILE = "ledger.json"
TRUST = "PRECONDATTN_TRUST_KERNELS"
"""The environment variable that, set to 1, also allows kernels without a ledger entry. It is read
when a call is first planned."""

SELECTING = ("metric", "decay", "bias", "softcap", "sink", "distance")
"""The options of leaves that select other kernels of a class, or other code in them."""


class LedgerEntry(NamedTuple):
    """A kernel that has run and agreed with the oracle."""

    family: str
    """The leaf or group, and its class of kernels, such as `"lucid_solve:LucidSolveKernels"`."""
    verb: str
    dtype: str
    width: int
    """The padded width of keys or values, whichever are wider."""
    capability: str
    assembler: str
    """The assembler of the machine code: `"ptxas 13.1"`, `"NVRTC 13.0"`, `"jaxlib 0.11.2"`."""
    code: str
    """The hash of the kernel's code (`kernel_backend.code_hash`)."""


def is_trusting() -> bool:
    """Whether the environment allows kernels without a ledger entry."""
    return os.environ.get(TRUST, "0") not in ("", "0")


def family_of(mechanism: Piece, entry: str) -> str:
    """The family of a leaf or group that the class `entry` (`"module:Class"`) computes."""
    return f"{'+'.join(map(_named, mechanism.program.leaves))}:{entry.partition(':')[2]}"


def _named(leaf: LeafProtocol) -> str:
    """The name of a leaf, with the options that select kernels if they differ from the default."""
    options = ",".join(
        f"{name}={'given' if isinstance(value, float) else value}"
        for name, field in fields_of(leaf).items()
        if name in SELECTING and (value := getattr(leaf, name)) != field.default
    )
    return f"{leaf.name}[{options}]" if options else leaf.name


def width_of(request: Request) -> int:
    """The padded width of the wider of keys and values; without them, of the widest array."""
    rows = [shape[-1] for name, shape in request.shapes if name in ("k", "v", "o")]
    return padded_width(max(rows or [shape[-1] for _, shape in request.shapes]))


@cache
def entries(package: str) -> frozenset[LedgerEntry]:
    """The entries of a backend's package; empty if it has no ledger."""
    spec = find_spec(package)
    path = Path(spec.origin).with_name(FILE) if spec is not None and spec.origin else None
    if path is None or not path.exists():
        return frozenset()
    return frozenset(LedgerEntry(**each) for each in json.loads(path.read_text(encoding="utf-8")))

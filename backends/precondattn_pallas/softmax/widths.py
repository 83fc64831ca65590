"""Widest keys and values of the attention kernels, limited by a multiprocessor's registers; and
the largest size of a launch grid."""

from __future__ import annotations

from precondattn.backend import Request
from precondattn.kernel_backend.limits import MOST_HEADS

WIDEST = {"float32": 128, "bfloat16": 256, "float16": 256}


def refuses_widths(kernels: str, request: Request) -> str | None:
    """The reason why these kernels do not support the widths or the number of heads."""
    shapes, widest = dict(request.shapes), WIDEST[request.dtype]
    for name, role in (("k", "keys"), ("v", "values")):
        if shapes[name][3] > widest:
            return (
                f"has kernels for {kernels} in {request.dtype} with {role} whose width is at "
                f"most {widest}; found {shapes[name][3]}"
            )
    if max(shapes["q"][0], shapes["q"][2]) > MOST_HEADS:
        return f"has kernels for {kernels} of at most {MOST_HEADS} sequences, and as many heads"
    return None

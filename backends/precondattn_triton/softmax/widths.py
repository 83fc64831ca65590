"""How wide keys and values of the attention kernels may be: LASER's, PaTH's, the differential's."""

from __future__ import annotations

WIDEST_KEY = 256
WIDEST_VALUE = {"float16": 512, "bfloat16": 512, "float32": 256}
"""What fits the registers and the shared memory of a multiprocessor. Factors in float32 take three
times their own."""


def limits(dtype: str, key: int, value: int) -> tuple[tuple[str, int, int], ...]:
    """What is limited in this dtype, its width, and the widest that there are kernels for."""
    return ("keys", key, WIDEST_KEY), ("values", value, WIDEST_VALUE[dtype])


def refuses_widths(kernels: str, dtype: str, key: int, value: int) -> str | None:
    """Why not, of these kernels; None where both widths have some."""
    for what, width, widest in limits(dtype, key, value):
        if width > widest:
            return (
                f"has kernels for {kernels} in {dtype} with {what} of width {widest} at most; "
                f"found {width}"
            )
    return None

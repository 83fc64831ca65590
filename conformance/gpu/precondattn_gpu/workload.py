"""A call of a mechanism on one backend, repeated by the stages `tuning` and `profile`."""

from __future__ import annotations

from collections.abc import Callable

from precondattn.arrays import Arrays
from precondattn_conformance.inputs import CallLayout
from precondattn_gpu.options import HELPER, LIBRARY


def workload(
    mechanism: str, work: str, layout: CallLayout, dtype: str, device: str, backend: str = "triton"
) -> Callable[[], Arrays]:
    """A function that runs the call once and returns its results by name: output and gradients."""
    import numpy as np

    import precondattn as pa
    from precondattn_conformance import libraries
    from precondattn_conformance.bench.computation import backward_run, forward_run, ours
    from precondattn_conformance.inputs import make_inputs

    parsed = pa.parse(mechanism)
    library = libraries.named(LIBRARY[backend], device)
    inputs = make_inputs(parsed, layout, "clustered")
    arrays = {name: library.array(array, dtype) for name, array in inputs.items()}
    of = ours(parsed, f"{backend},{HELPER[backend]}")
    if work == "forward":
        return forward_run(of, library, arrays).call
    out = forward_run(of, library, arrays).call()["the output"]
    cotangent = library.array(np.random.default_rng(1).normal(size=tuple(out.shape)), dtype)
    return backward_run(of, library, arrays, cotangent).call

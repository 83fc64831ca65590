"""The inputs of a mechanism, in the arrays of a library."""

import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs


def inputs_of(mechanism, library="numpy", kind="random", *, requires_grad=False, seed=0, **sizes):
    """In float64, for a mechanism or an expression; `t` tokens are also `s` tokens."""
    m = pa.parse(mechanism) if isinstance(mechanism, str) else mechanism
    sizes = {"s": sizes.get("t", 7), **sizes}
    made = make_inputs(m, CallLayout("test", **sizes), kind, seed)
    if library == "torch":
        torch = pytest.importorskip("torch")
        return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}
    if library == "numpy":
        return made
    xp = pytest.importorskip("jax.numpy" if library == "jax" else library)
    return {name: xp.asarray(array) for name, array in made.items()}

"""JAX's strict modes: every verb runs in all of them at once."""

from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.libraries import named

FIRST = ("softmax[window=3]", "lucid(laser)", "ccq")
OTHERS = (
    *("softmax[forget=unscaled]", "softmax[distance=slopes]", "path[forget=scaled,flush=3]"),
    *("deltaformer", "nystrom[landmarks=5,skip=true]", "windowed[size=3,shift=1,scale=0.3]"),
    *("gsa", "mlstm", "kda", "atk(kda)", "lucid[normalize=rows]", "lucid(path[flush=3])", "mesa"),
    *("differential[per=token]", "qk_norm[norm=layer,gain=true]"),
)
"""One mechanism of each kind of code."""
MODES = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
MODES |= {"jax_debug_nans": True, "jax_disallow_mesh_context_manager": True}
T = 9
MASKS = {"lengths": [T, 4], "key_mask": np.arange(2 * T).reshape(2, T) % 5 > 0}


def rows():
    """Each mechanism is traced; some run, which JAX compiles operation by operation."""
    for text in (*FIRST, *OTHERS):
        yield pytest.param("float32", text, False, id=f"{text}-traced")
    for dtype, text in (("float32", FIRST[0]), ("float64", FIRST[1]), ("float32", FIRST[2])):
        yield pytest.param(dtype, text, True, id=f"{text}-{dtype}", marks=pytest.mark.thorough)
    for text in OTHERS:
        yield pytest.param("float32", text, True, id=f"{text}-float32", marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "text", "runs"), list(rows()))
def test_every_verb_runs_in_the_strict_modes(dtype, text, runs):
    m = pa.parse(text)
    made = make_inputs(m, CallLayout("test", t=T, s=T), "random")

    def verbs(x, masks, backend=None):
        out, pullback = m.vjp(**x, backend=backend)
        gradient = jax.grad(lambda x: m(**x, **masks, backend=backend).sum())(x)
        results = [m(**x, **masks, backend=backend), pullback(out), gradient]
        if m.offers.causal and "bias" not in x:
            cache = m.init_cache(**x, capacity=2 * T)
            _, cache = m.extend(cache, **x, lengths=masks["lengths"], backend=backend)
            results.append(m.extend(cache, **x, backend=backend)[0])
        return results

    def both(x, masks):
        return verbs(x, masks), verbs(x, masks, "reference")

    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(dtype == "float64"))
        for name, value in MODES.items():
            stack.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, value)
        x = {name: jax.numpy.asarray(array, dtype=dtype) for name, array in made.items()}
        masks = {name: jax.numpy.asarray(mask) for name, mask in MASKS.items()}
        found = both(x, masks) if runs else jax.eval_shape(both, x, masks)
        assert all(array.dtype == dtype for array in jax.tree.leaves(found))
        if runs:
            with jax.transfer_guard("disallow"):  # Outside `jit`, JAX itself transfers constants.
                jax.jit(verbs)(x, masks)
    named("jax").forget()  # A process maps a limited number of regions.

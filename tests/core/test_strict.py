"""array_api_strict with every optional feature off, on a device that is not the default one.

The reference, whose mathematics has to run on any library, and the backends of default dispatch.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.declared import expressions
from precondattn_conformance.inputs import Layout, make_inputs, slice_tokens

strict = pytest.importorskip("array_api_strict")


@pytest.mark.parametrize("expression", expressions())
@pytest.mark.parametrize("backend", ["reference", None], ids=["reference", "default"])
def test_only_the_array_api_standard_is_used_and_arrays_stay_on_their_device(backend, expression):
    m = pa.parse(expression)
    layout = Layout("test", t=5, s=5)
    made = make_inputs(m, layout, "clustered")
    device = strict.Device("device1")
    flags = strict.ArrayAPIStrictFlags(
        boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=("linalg",)
    )
    with flags:
        x = {name: strict.asarray(array, device=device) for name, array in made.items()}
        lengths = strict.asarray(np.asarray([3, 5]), device=device)
        out, pullback = m.vjp(**x, lengths=lengths, backend=backend)
        gradients = pullback(strict.ones_like(out))
        assert {array.device for array in (out, *gradients.values())} == {device}
        if m.offers.causal and not m.inputs.keys() & {"bias"}:
            cache = m.init_cache(**x, capacity=6)
            outs = []
            for start, stop in ((0, 2), (2, 5)):
                more, cache = m.extend(cache, **slice_tokens(m, x, start, stop), backend=backend)
                outs.append(more)
            assert {array.device for array in (cache.length, *cache.store.values())} == {device}
            joined = np.from_dlpack(strict.concat(outs, axis=1))
            np.testing.assert_allclose(joined, m(**made), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        np.from_dlpack(out), m(**made, lengths=np.asarray([3, 5])), rtol=1e-10, atol=1e-12
    )

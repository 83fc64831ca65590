"""array_api_strict with every optional feature off, on a device that is not the default one.

The conformance suite runs every mechanism so, on the reference and on the blocked backends, and
refuses results of another device.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance import libraries
from tests.core.inputs import inputs_of

strict = pytest.importorskip("array_api_strict")


@pytest.mark.parametrize("expression", ["softmax", "gated_delta"])
def test_operations_on_caches_take_arrays_of_the_library_on_its_device(expression):
    m, device = pa.parse(expression), strict.Device("device1")
    made = inputs_of(m, kind="clustered", b=1, t=5)

    def saved(asarray, name):
        x = {name: asarray(array) for name, array in made.items()}
        rows, ends = asarray(np.asarray([0, 1])), asarray(np.asarray([0, 2, 5]))
        empty = m.init_cache(**x, capacity=9, sequences=2)
        cache = m.extend(empty, **x, cu_seqlens=ends, keep=1)[1].crop(rows + 1)
        parts = cache.select(rows > 0), cache.reorder(rows).restore(empty.snapshot()).grow(12)
        return pa.Cache.concatenate(parts).to(device=name).state_dict()

    with strict.ArrayAPIStrictFlags(
        boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()
    ):
        found = saved(lambda array: strict.asarray(array, device=device), "device1")
    for name, expected in saved(np.asarray, "cpu").items():
        assert found[name].device == device
        np.testing.assert_allclose(np.from_dlpack(found[name]), expected, rtol=0, atol=1e-12)


def test_the_suite_refuses_optional_features_and_arrays_of_another_device():
    library = libraries.named("array_api_strict")
    with library.precision("float64"):
        array = library.array(np.ones(2))
        with pytest.raises(RuntimeError, match="data_dependent_shapes"):
            strict.unique_values(array)
        with pytest.raises(RuntimeError, match="boolean_indexing"):
            array[array > 0]
        with pytest.raises(ValueError, match="must be on the inputs' device1; found"):
            library.numpy(strict.ones(2))
        np.testing.assert_array_equal(library.numpy(array), np.ones(2))

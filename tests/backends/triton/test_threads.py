"""Triton's interpreter runs one program at a time: calls from several threads wait."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_triton.backend import is_interpreting

torch = pytest.importorskip("torch")


@pytest.mark.skipif(not is_interpreting(), reason="kernels run on a GPU")
def test_interpreted_calls_from_several_threads():
    m = pa.Linear()
    inputs = make_inputs(m, CallLayout("threads", t=70, s=70), "random")
    x = {name: torch.asarray(array, dtype=torch.float32) for name, array in inputs.items()}
    other = {name: -2 * array for name, array in x.items()}

    def call(x):
        return m(**x, backend="triton")

    expected = [call(x), call(other)] * 2
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, [x, other] * 2))
    for out, alone in zip(found, expected, strict=True):
        assert torch.equal(out, alone)

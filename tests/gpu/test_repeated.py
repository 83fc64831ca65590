"""The check that a repeated call has the results of the first."""

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_gpu import repeated
from precondattn_gpu.call import layout_of

LAYOUT = layout_of(8, 8, 5)


@pytest.mark.parametrize("name", ["output", "gradient of k"])
def test_a_third_call_that_differs_is_found(name, monkeypatch):
    library, calls, results = libraries.named("torch", "cpu"), [], repeated._results

    def third_is_wrong(*arguments):
        calls.append(results(*arguments))
        if len(calls) == 3:
            calls[-1][name] = torch.nextafter(calls[-1][name], torch.tensor(9.0))
        return calls[-1]

    arguments = ("gated_delta", LAYOUT, "float32", library, ("reference",))
    assert repeated.difference(*arguments) == ""
    monkeypatch.setattr(repeated, "_results", third_is_wrong)
    assert repeated.difference(*arguments) == name
    assert set(calls[0]) == {"output", *(f"gradient of {n}" for n in pa.GatedDelta().inputs)}

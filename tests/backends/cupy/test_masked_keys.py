"""A new token whose own key is hidden reads the others: steps of one token, by kernels."""

from tests.backends.cupy import simulated  # noqa: F401  # isort: skip

import pytest

pytest.importorskip("triton")

from precondattn_conformance.cases import cases
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import PASSED


@pytest.mark.parametrize(
    ("backends", "library", "mechanism"),
    [
        *((("triton", "torch"), "torch", name) for name in ("lucid", "path[flush=3]")),
        (("pallas", "jax"), "jax", "lucid"),
        *((("cupy", "portable"), "numpy", name) for name in ("lucid", "softmax", "laser")),
    ],
)
@pytest.mark.parametrize("check", ["caching", "splits"])
def test_a_token_that_is_hidden_reads_the_past(check, backends, library, mechanism):
    found = [
        case
        for case in cases(
            "full",
            only_libraries=(library,),
            only_mechanisms=(mechanism,),
            only_checks=(check,),
            only_dtypes=("float32",),
        )
        if "-masked-" in case.id
    ]
    assert found
    for case in found:
        outcome = run_case(case, backends)
        assert outcome.status == PASSED, outcome.reason

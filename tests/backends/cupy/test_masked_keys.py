"""A new token with a masked key attends to the other keys, in kernels for steps of one token."""

from importlib.util import find_spec

import pytest

from precondattn_conformance.cases import cases
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import PASSED
from tests.kernel_tools.toolchain import needs_simulator

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("backends", "library", "mechanism"),
    [
        *(
            pytest.param(("triton", "torch"), "torch", name, marks=needs_triton)
            for name in ("lucid", "path[flush=3]")
        ),
        (("pallas", "jax"), "jax", "lucid"),
        *(
            pytest.param(("cupy", "portable"), "numpy", name, marks=needs_simulator)
            for name in ("lucid", "softmax", "laser")
        ),
    ],
)
@pytest.mark.parametrize("check", ["caching", "splits"])
def test_a_token_whose_key_is_masked_attends_to_the_cache(check, backends, library, mechanism):
    result = [
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
    assert result
    for case in result:
        outcome = run_case(case, backends)
        assert outcome.status == PASSED, outcome.reason

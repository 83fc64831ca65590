"""The cases of the conformance suite on the CuPy backend, by kernels with small tiles."""

import pytest

import precondattn as pa
from precondattn_conformance.grid import TWO_OF_33
from precondattn_cupy.configurations import forced
from tests.backends.cupy.simulated import SMALL, inputs_of
from tests.backends.mechanism_groups import check, fewer_queries, groups, groups_of, only
from tests.kernel_tools.toolchain import needs_simulator

TAKEN = (
    *("lucid_solve", "lucid_solve[beta=true]", "lucid", "lucid[beta=true]"),
    *("gated_delta", "delta", "conditioned_query"),
    *("softmax", "softmax[causal=false]", "softmax[scale=0.3]", "softmax[window=3]"),
    *("laser", "laser(softmax[causal=false])", "laser(softmax[window=3])"),
)
STATES = {"states": ((TWO_OF_33, "clustered"),)}
IN_HALF = ("lucid_solve[beta=true]", "lucid[beta=true]", "gated_delta", "softmax", "laser")


# Thorough: the first test of each kernel compiles it for the simulator, which takes seconds.
@pytest.mark.thorough
@needs_simulator
@pytest.mark.parametrize(
    "group",
    [
        *only(TAKEN.__contains__, groups("smoke", "numpy", ("float32",))),
        *only(IN_HALF.__contains__, groups("smoke", "numpy", ("bfloat16", "float16"))),
        *only("kda".__eq__, groups_of("numpy", "float32", STATES)),
        *fewer_queries("numpy", "float32", (*TAKEN, "ssd", "ccq(gated_delta)")),
    ],
)
def test_all_supported_mechanisms_conform(group):
    with forced(**SMALL):
        check(group, "cupy", "portable", some=True)


@pytest.mark.parametrize("mechanism", [pa.Softmax(), pa.Laser(), pa.Softmax(bias=True)])
def test_calls_without_a_kernel_are_left_to_portable(mechanism):
    x = inputs_of(mechanism, 20)
    result = mechanism.explain(**x, backend=("cupy", "portable"))
    assert result.backends == ("portable" if "bias" in x else "cupy",)
    assert "bias" not in x or "no kernel for attention with a bias" in str(result)

"""The suite's check `sharding` on four devices: it passes, and it finds planted faults.

`test_devices.py` runs these tests, in a process that has several devices.
"""

import jax
import pytest

from precondattn.frameworks.jax import independent_axes, sharding
from precondattn_conformance.cases import cases
from precondattn_conformance.runner import run_case
from tests.backends.jax.four_devices import told

__all__ = ["told"]

if jax.device_count() < 4:
    pytest.skip("needs four devices", allow_module_level=True)


def checked(expression, backend):
    """The outcome of the suite's check."""
    (case,) = cases(
        "full",
        only_libraries=("jax",),
        only_mechanisms=(expression,),
        only_checks=("sharding",),
    )
    return run_case(case, backend)


@pytest.mark.parametrize(
    ("expression", "backend"),
    [
        *((name, "jax") for name in ("laser", "lucid(path)", "ssd", "ccq(gated_delta)")),
        ("lucid", "reference"),
        ("gla", "pallas"),
    ],
)
def test_the_check_of_the_suite_passes(expression, backend):
    outcome = checked(expression, backend)
    assert outcome.status == "passed", outcome.text


@pytest.fixture
def faulty(monkeypatch):
    """Compiled functions are forgotten before and after a fault is planted."""
    jax.clear_caches()
    yield monkeypatch
    monkeypatch.undo()
    jax.clear_caches()


def test_the_check_finds_a_rule_without_heads(faulty, told):
    faulty.setattr(independent_axes, "INDEPENDENT", "b")
    outcome = checked("linear", "jax")
    assert outcome.status == "failed"
    assert "all-gather" in outcome.reason
    with pytest.raises(AssertionError):
        exec(outcome.snippet, {})
    faulty.undo()
    jax.clear_caches()
    exec(outcome.snippet, {})  # The snippet passes.


def test_the_check_finds_a_rule_that_divides_time(faulty):
    """The tokens of two devices do not attend to each other."""
    letter = independent_axes._DeclaredAxes._letter
    faulty.setattr(
        independent_axes._DeclaredAxes,
        "_letter",
        lambda self, name, size: "b" if name in "ts" else letter(self, name, size),
    )
    assert checked("linear", "jax").status == "failed"


def test_the_check_finds_a_gradient_that_is_not_summed_over_devices(faulty):
    faulty.setattr(sharding, "GRADIENTS", ())
    outcome = checked("differential", "jax")
    assert outcome.status == "failed"
    assert "lam" in outcome.reason

"""The suite's check `sharding` on four devices: it passes, and it finds planted faults.

`test_devices.py` runs these tests, in a process that has several devices.
"""

import jax
import pytest

from precondattn.frameworks.jax import independent_axes
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
        *((name, "jax") for name in ("lucid(path)", "ccq(gated_delta)")),
        ("lucid", "reference"),
        ("gla", "pallas"),
    ],
)
def test_the_check_of_the_suite_passes(expression, backend):
    outcome = checked(expression, backend)
    assert outcome.status == "passed", outcome.text


def test_the_check_finds_a_rule_without_heads(monkeypatch, told):
    jax.clear_caches()  # Compiled functions are forgotten before and after a fault is planted.
    monkeypatch.setattr(independent_axes, "INDEPENDENT", "b")
    outcome = checked("linear", "jax")
    assert outcome.status == "failed"
    assert "all-gather" in outcome.reason
    with pytest.raises(AssertionError):
        exec(outcome.snippet, {})
    monkeypatch.undo()
    jax.clear_caches()
    exec(outcome.snippet, {})  # The snippet passes.

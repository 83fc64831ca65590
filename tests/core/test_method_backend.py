"""Packages of kernels whose methods get the piece run as they were written.

`tests/third_party/packages_with_methods` has two.
"""

import sys
from pathlib import Path

import pytest

import precondattn as pa
from precondattn.dispatch.discovery import discover
from precondattn_conformance.cases import cases
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, PASSED

torch = pytest.importorskip("torch")

PACKAGES = Path(__file__).parents[1] / "third_party" / "packages_with_methods"
BACKENDS = {"lucid_solve": "methods-lucid-solve", "gated_delta": "methods-gated-delta"}


@pytest.fixture
def packages(only_the_reference, monkeypatch):
    """The packages, installed for one test."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    yield
    for name in [name for name in sys.modules if name.startswith("methods_")]:
        del sys.modules[name]


@pytest.mark.parametrize("mechanism", BACKENDS)
def test_such_a_package_conforms(packages, mechanism):
    chosen = {"only_libraries": ("torch",), "only_mechanisms": (mechanism,)}
    outcomes = [run_case(case, BACKENDS[mechanism]) for case in cases("smoke", **chosen)]
    report = Report(outcomes)
    assert report.count(FAILED) == 0, [str(o) for o in outcomes if o.status == FAILED]
    assert report.count(PASSED) > 20


@pytest.mark.parametrize("mechanism", BACKENDS)
def test_autograd_calls_its_backward(packages, mechanism, monkeypatch):
    m, backend = pa.parse(mechanism), BACKENDS[mechanism]
    inputs = make_inputs(m, CallLayout("test", t=5, s=5), "random")
    methods = discover().named(backend).methods
    called, backward = [], methods.backward
    monkeypatch.setattr(
        methods, "backward", lambda *arrays: called.append(mechanism) or backward(*arrays)
    )

    def gradients(backend):
        x = {name: torch.tensor(array, requires_grad=True) for name, array in inputs.items()}
        return torch.autograd.grad(m(**x, backend=backend).square().sum(), list(x.values()))

    torch.testing.assert_close(gradients(backend), gradients("reference"))
    assert called == [mechanism]


def test_its_data_are_those_of_the_class_and_the_defaults(packages):
    backend = discover().named("methods-lucid-solve")
    assert backend.libraries == {"torch"}
    assert backend.covers == {"lucid_solve"}
    assert backend.memory == "linear"
    assert backend.promises == pa.CONVENTIONS
    backend.methods.preference = 3
    assert backend.preference == 3

"""A scan of states along 64 devices, simulated in one process: its error in float32."""

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.states import refusal, step_of_tokens
from precondattn_conformance.inputs import CallLayout, make_inputs

DEVICES = 64


def scanned(steps):
    """S_begin of every device, by the rounds of `states_before`."""
    distance = 1
    while distance < len(steps):
        steps = [
            step.after(steps[i - distance]) if i >= distance else step
            for i, step in enumerate(steps)
        ]
        distance *= 2
    return [step.state for step in steps[:-1]]


def problem(expression, keys):
    m = pa.parse(expression)
    layout = CallLayout("test", b=1, t=DEVICES * 8, s=DEVICES * 8, d=16, e=12)
    return m, {n: torch.tensor(a) for n, a in make_inputs(m, layout, keys).items()}


@pytest.mark.parametrize("keys", ["random", "clustered"])
@pytest.mark.parametrize("expression", ["ssd", "gla", "gated_delta", "kda"])
def test_states_before_each_of_64_devices(expression, keys):
    m, x = problem(expression, keys)
    cache, exact = m.init_cache(**x), []
    for i in range(DEVICES - 1):
        _, cache = m.extend(cache, **{n: a[:, 8 * i : 8 * i + 8] for n, a in x.items()})
        exact.append(next(iter(cache.store.values())))
    single = {n: a.float() for n, a in x.items()}
    steps = [
        step_of_tokens(m, {n: a[:, 8 * i : 8 * i + 8] for n, a in single.items()}, None, {})
        for i in range(DEVICES)
    ]
    largest = max(float(state.abs().max()) for state in exact)
    for state, expected in zip(scanned(steps), exact, strict=True):
        assert float((state - expected).abs().max()) < 2e-5 * largest


def test_the_adjoint_of_a_step_is_its_transpose():
    m, x = problem("gated_delta", "clustered")
    step = step_of_tokens(m, x, None, {})
    s, g = torch.randn(2, *step.state.shape, dtype=torch.float64)
    linear = step.end_of(s) - step.state
    adjoint = step.adjoint(0 * g).end_of(g)
    torch.testing.assert_close((linear * g).sum(), (s * adjoint).sum())


def test_states_that_are_relative_to_a_running_maximum_have_no_scan():
    assert "which are relative to a running maximum" in refusal(
        pa.MLSTM(), TokenOrder("contiguous")
    )

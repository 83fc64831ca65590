"""Extreme gates detect decays computed as differences of cumulative sums; powers of two do not."""

from functools import lru_cache

import numpy as np
import pytest

from precondattn_conformance import check, extremes, oracle
from precondattn_conformance.checks import check as of_check

torch = pytest.importorskip("torch")

DYADIC = np.asarray([0.0, -20.0, -0.5, -1e4, -3.0])


def by_differences(q, k, v, g):
    """A gated state in one block, with the decay from j to i computed as exp(G_i − G_j)."""
    q, k = (x.repeat_interleave(g.shape[2] // x.shape[2], 2) for x in (q, k))
    v = v.repeat_interleave(g.shape[2] // v.shape[2], 2)
    sums = g.cumsum(1).transpose(1, 2)
    t = q.shape[1]
    later = torch.ones(t, t, dtype=torch.bool).triu(1)
    decay = (sums[..., None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    weights = torch.einsum("bthd,bshd->bhts", q, k) * decay
    return torch.einsum("bhts,bshe->bthe", weights, v)


@pytest.fixture
def fresh(monkeypatch):
    """Clear the caches of inputs and results, which are keyed by the name of the data only."""
    kept = lru_cache(maxsize=8)
    monkeypatch.setattr(oracle, "_kept", kept(oracle._computed))
    for module in (oracle, of_check):
        monkeypatch.setattr(module, "inputs_of", kept(oracle.inputs_of.__wrapped__))


def failures():
    options = {"library": "torch", "dtypes": ["float32"], "level": "full", "checks": ["stability"]}
    result = check(by_differences, "ssd", progress=False, **options)
    assert any(outcome.case.kind == "extreme_gates" for outcome in result.compared), str(result)
    return {(o.case.layout.name, o.case.kind) for o in result.failures}


def test_a_decay_that_is_a_difference_of_cumulative_sums_fails_at_gates_of_many_digits():
    assert ("block_and_one", "extreme_gates") in failures()


@pytest.mark.usefixtures("fresh")
def test_it_passed_at_gates_that_are_powers_of_two(monkeypatch):
    monkeypatch.setattr(extremes, "GATES", DYADIC)
    monkeypatch.setattr(extremes, "JUMP", -1e4)
    assert not failures()


def test_there_is_a_jump_in_the_first_and_in_the_last_token_of_a_block():
    gates = extremes._with_jumps_at_edges(np.zeros((1, 65, 2)))
    jumps = {(int(t), int(head)) for t, head in np.argwhere(gates[0] == extremes.JUMP)}
    for edge in (16, 32, 48, 64):
        assert {head for t, head in jumps if t == edge - 1} ^ {
            head for t, head in jumps if t == edge
        } == {0, 1}

"""Tuning: a winner is faster by more than chance, and computes the same result."""

import pytest

pytest.importorskip("triton")

import triton.testing

from precondattn_gpu import tune
from precondattn_triton import candidates
from precondattn_triton.configurations import Configuration, configuration

GOOD, SLOW = Configuration(16, 16, 4, 1), Configuration(16, 32, 4, 1)


def test_the_fastest_candidate_that_computes_the_same_wins(monkeypatch):
    """The clock is simulated, and the kernels are interpreted."""
    seen = []

    def do_bench(call, **options):
        call()
        used = configuration("laser_forward", 16, True)
        seen.append(used)
        return {GOOD: 1.0, SLOW: 3.0}.get(used, 2.0)

    for name, value in {"BATCH": 1, "TOKENS": 20, "HEADS": 1}.items():
        monkeypatch.setattr(tune, name, value)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    broken = Configuration(7, 7, 4, 1)  # It is not a power of two.
    monkeypatch.setattr(candidates, "candidates", lambda *key: [SLOW, GOOD, broken])
    result = tune.timed("laser_forward", 16, "cpu")
    assert result["winner"] == list(GOOD)
    assert result["message"].startswith("default 2.000 ms (± 0.000), best [16, 16, 4, 1] 1.000 ms")
    by_configuration = {tuple(each["configuration"]): each for each in result["candidates"]}
    assert by_configuration[SLOW]["ms"] == 3.0
    assert "ms" not in by_configuration[broken]
    assert by_configuration[broken]["failures"]
    default = Configuration(*result["default"]["configuration"])
    assert default not in (GOOD, SLOW)
    assert seen.count(default) == 4  # The default runs first, and after each candidate.


@pytest.mark.parametrize(
    ("default", "candidate", "wins"),
    [
        ([2.0, 2.0], 1.9, True),
        ([2.0, 2.0], 1.97, False),  # It is less than 2 % faster.
        ([2.0, 2.3], 1.9, False),  # The default's own variation is as large.
    ],
)
def test_a_winner_is_faster_by_more_than_chance(default, candidate, wins):
    tried = [{"configuration": [64, 64, 4, 2], "ms": candidate}, {"configuration": [1, 1, 4, 1]}]
    assert (tune._winner(tried, default)[1] is not None) == wins


def test_without_a_time_there_is_no_winner():
    assert tune._winner([{"configuration": [64, 64, 4, 2]}], [1.0]) == ("no candidate ran", None)

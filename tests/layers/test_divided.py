"""Models that are divided among processes, beside one process."""

import pytest

pytest.importorskip("torch")

from tests.layers.divided_layers import CHECKS, OF_ADAPTERS
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs the checks for so many processes once (`divided_layers.py`)."""
    folders = {}

    def done(count, check):
        if count not in folders:
            folders[count] = tmp_path_factory.mktemp(f"of {count}")
            run_ranks("tests.layers.divided_layers", count, folders[count])
        return all((folders[count] / f"{check} {rank}").exists() for rank in range(count))

    return done


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_compute_what_one_does_or_refuse(run, check):
    assert run(2, check)


@pytest.mark.thorough
def test_models_with_adapters_are_among_the_checks():
    for package in ("peft", "torchao"):
        pytest.importorskip(package)
    assert {check.__name__ for check in OF_ADAPTERS} < set(CHECKS)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(4, marks=pytest.mark.slow),  # Eight have another axis besides these.
        pytest.param(8, marks=pytest.mark.thorough),
    ],
)
def test_training_on_data_and_context_and_weights_gives_the_losses_of_one_process(run, count):
    """A restart on another mesh gives these losses too."""
    assert run(count, "training")

"""Models that are divided among processes, beside one process."""

import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import divide_tokens
from tests.ranks import run_ranks


def run_processes(count, folder):
    """Run the checks for so many processes (`divided_process.py`)."""
    run_ranks("tests.layers.divided_process", count, folder)
    assert all((folder / f"done {rank}").exists() for rank in range(count))


@pytest.mark.thorough
def test_layers_of_some_heads_each_give_the_outputs_and_gradients_of_one_process(tmp_path):
    run_processes(2, tmp_path)


@pytest.mark.slow  # The next test has another axis besides these.
def test_training_on_data_and_context_gives_the_losses_of_one_process(tmp_path):
    """A restart on another mesh gives these losses too."""
    run_processes(4, tmp_path)


@pytest.mark.thorough
def test_training_on_data_and_context_and_weights_gives_the_losses_of_one_process(tmp_path):
    """A restart on another mesh gives these losses too."""
    run_processes(8, tmp_path)


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="model has no Attention; found Linear"):
        divide_tokens(torch.nn.Linear(2, 2), None)

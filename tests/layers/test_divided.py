"""Models that are divided among processes, beside one process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

from precondattn.layers.torch import divide_tokens


def run_processes(count, folder):
    """Run the checks for so many processes (`divided_process.py`)."""
    command = [sys.executable, "-m", "tests.layers.divided_process"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([*command, str(rank), str(count), str(folder)], env=environment)
        for rank in range(count)
    ]
    try:
        assert [worker.wait(timeout=600) for worker in workers] == [0] * count
    finally:
        for worker in workers:
            worker.kill()
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

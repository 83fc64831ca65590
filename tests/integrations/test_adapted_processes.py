"""Models with adapters or int8 weights on two processes: FSDP2, and divided weights."""

import pytest

pytest.importorskip("peft")
pytest.importorskip("torchao")

import torch

from tests.integrations.adapted_process import CHECKS, adapted_process

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_compute_the_same_or_refuse(check, tmp_path):
    torch.multiprocessing.spawn(adapted_process, (check, tmp_path), nprocs=2)
    assert (tmp_path / "done 0").exists()
    assert (tmp_path / "done 1").exists()

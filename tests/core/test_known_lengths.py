"""Lengths on an accelerator that the host knows. A tensor on the CPU stands in for one there."""

import gc

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.cache import append, known_lengths
from precondattn.cache.known_lengths import lengths_on_host, remembered
from precondattn.frameworks.torch.framework import PyTorch
from tests.core.inputs import inputs_of


@pytest.fixture
def reads(monkeypatch):
    """The lengths that are read, each of which would wait for the device."""
    found, tolist = [], torch.Tensor.tolist

    def read(tensor):
        found.append(tensor.shape)
        return tolist(tensor)

    monkeypatch.setattr(PyTorch, "is_far", lambda *_: True)
    monkeypatch.setattr(known_lengths, "_remembered", {})
    monkeypatch.setattr(torch.Tensor, "tolist", read)
    return found


def test_a_length_is_known_until_it_is_written_to_and_nothing_is_kept_of_the_past(reads):
    length = remembered(torch.full((2,), 7, dtype=torch.int32), 7)
    assert lengths_on_host(length) == [7, 7]
    assert not reads
    length[:1].add_(1)
    assert lengths_on_host(length) == [8, 7]
    assert lengths_on_host(length) == [8, 7]  # What was read is not remembered.
    assert len(reads) == 2
    length = remembered(torch.zeros(2, dtype=torch.int32), 0)
    assert lengths_on_host(length.clone()) == [0, 0]
    with torch.inference_mode():
        assert lengths_on_host(remembered(torch.zeros(2, dtype=torch.int32), 0)) == [0, 0]
    assert len(reads) == 4
    del length
    gc.collect()
    assert not known_lengths._remembered


def test_tokens_are_appended_without_reading_their_number():
    """Each sequence has its own length and count, and tokens beyond the capacity are dropped."""
    buffer = torch.arange(3 * 5 * 2.0).reshape(3, 5, 2)
    tokens = -1 - torch.arange(3 * 7 * 2.0).reshape(3, 7, 2)
    lengths, counts = torch.tensor([0, 2, 4]), torch.tensor([7, 5, 0])
    expected = buffer.clone()
    expected[0] = tokens[0, :5]
    expected[1, 2:] = tokens[1, :3]
    for donate in (False, True):
        given = buffer.clone()
        with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = [mode.from_tensor(x) for x in (given, tokens, lengths, counts)]
            append(*fake, donate=donate)  # It would fail if it read an entry.
        result = append(given, tokens, lengths, counts, donate=donate)
        assert torch.equal(result, expected)
        assert (result is given) == donate


def test_generation_reads_no_length(reads, monkeypatch):
    monkeypatch.setattr(PyTorch, "reads_at_once", False)
    m, x = pa.GatedDelta(), inputs_of("gated_delta", "torch", t=1)
    cache = m.init_cache(**x)
    with torch.no_grad():
        for _ in range(3):
            _, cache = m.extend(cache, **x, donate=True)
    assert lengths_on_host(cache.length) == [3, 3]
    assert not reads
    assert cache.length.tolist() == [3, 3]

"""Packed softmax attention in groups of blocks: any number of blocks in a group, all options."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frameworks.jax import sharding
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_jax import layout as jax_layout
from precondattn_jax.grouped_attention import GroupedAttention
from tests.backends.portable.test_blocked_backends import compare
from tests.conftest import compiled_for

BLOCKS = {"one": 1, "two": 4 * 2 * 4 * 4 * 2, "all": 2**17}
"""`layout.GROUPED` for groups of one, two or all blocks of 4 tokens, 2 sequences and 4 heads."""

LENGTHS = ([9, 1, 1, 12, 3, 4], [2, 14, 4, 4, 4, 2])
"""Lengths of the segments of each sequence. Most are not aligned to blocks."""

OPTIONS = [
    pa.Softmax(window=6),
    pa.Softmax(causal=False, window=3),
    pa.Softmax(softcap=0.7, sink=True),
    pa.Laser(),
]


def inputs(m, t=30, s=30, n=2):
    x = make_inputs(m, CallLayout("packed", b=2, t=t, s=s, h=4, n=n, d=6, e=5), "random")
    ids = np.stack([np.repeat(7 - np.arange(len(row)), row) for row in LENGTHS])
    return x | {"segment_ids": ids}


def set_groups(monkeypatch, blocks):
    monkeypatch.setattr(jax_layout, "GROUPED", BLOCKS[blocks])
    monkeypatch.setattr(sharding, "compiled", compiled_for("small", blocks))


@pytest.fixture(autouse=True)
def two_blocks_in_a_group(small_blocks, monkeypatch):
    set_groups(monkeypatch, "two")


@pytest.mark.parametrize("m", OPTIONS, ids=str)
def test_output_and_gradients_are_the_references(m):
    compare("jax", m, inputs(m))


@pytest.mark.parametrize(("blocks", "shape"), [("one", (8, 1)), ("two", (4, 2)), ("all", (1, 8))])
def test_any_number_of_blocks_in_a_group(blocks, shape, monkeypatch):
    set_groups(monkeypatch, blocks)
    shapes = set()
    start = GroupedAttention.__init__

    def recorded(self, *arguments):
        start(self, *arguments)
        shapes.add((self.groups, self.size))

    monkeypatch.setattr(GroupedAttention, "__init__", recorded)
    m = pa.Softmax(softcap=3.0)  # No other test has compiled it.
    compare("jax", m, inputs(m))
    assert shapes == {shape}


@pytest.mark.parametrize(("mask", "t"), [("lengths", 17), ("key_mask", 30)])
def test_with_another_mask_or_fewer_queries_than_keys(mask, t):
    m = pa.Softmax(causal=t < 30)
    others = {"lengths": np.asarray([26, 13]), "key_mask": np.arange(60).reshape(2, 30) % 5 != 1}
    compare("jax", m, inputs(m, t=t, n=1) | {mask: others[mask]})


def test_values_too_far_apart_for_one_shift():
    x = inputs(pa.Laser())
    x["v"][:, 8:20] += 1500.0
    x["v"][:, 25, :, 1] -= 900.0
    compare("jax", pa.Laser(), x)

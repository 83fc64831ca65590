"""The declared work of kernels equals the interpreter's counts, and gives their rooflines."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn_kernel_tools.roof import H100, KernelWork, filled, predicted, roof
from precondattn_kernel_tools.triton_products import counted_products
from precondattn_triton import work
from precondattn_triton.backend import Triton
from precondattn_triton.configurations import Configuration
from precondattn_triton.lucid import solve
from precondattn_triton.work import Size
from tests.backends.triton.tiles import small_tiles

DOCS = Path(__file__).parents[3] / "docs"
HEADS = 2
SIZE = Size(HEADS, 64, 16, 32)
WIDE = Configuration(32, 16)
NARROW = CHUNKS = Configuration(16, 16)

STATED = {
    "lucid_solve": {
        "update": [work.update(SIZE, WIDE, 32, 16, key_sums=sums) for sums in (False, True)],
        "substitute": work.substitute(SIZE, tile=16, block=32, solver=32),
        "key_gradient": work.key_gradient(SIZE, WIDE, block=32),
    },
    "laser": {
        "_close": work.close(SIZE, WIDE),
        "_query_gradient": work.laser_query_gradient(SIZE, WIDE),
        "_key_gradient": work.laser_key_gradient(SIZE, WIDE),
    },
    "path": {
        "_forward": work.path_forward(SIZE, WIDE, chunk=16, block=32),
        "carry": work.path_carry(SIZE, WIDE, chunk=16, block=32),
        "query_gradient": work.path_query_gradient(SIZE, WIDE, NARROW, chunk=16, block=32),
        "key_value_gradient": work.path_key_gradient(SIZE, NARROW, NARROW, chunk=16, block=32),
        "reflections": work.path_reflections(SIZE, part=16, chunk=16, block=32),
    },
    "gated_delta": {
        "prepare": [work.prepare(SIZE, CHUNKS, is_backward=again) for again in (False, True)],
        "carry_states": work.carry_states(SIZE, CHUNKS),
        "read": work.read(SIZE, CHUNKS),
        "carry_gradients": work.carry_gradients(SIZE, CHUNKS),
        "d_inputs": work.d_inputs(SIZE, CHUNKS),
    },
    "gla": {
        "channel_scores": work.channel_scores(SIZE, CHUNKS),
        "carry_states": work.carry_states(SIZE, CHUNKS, erases=False),
        "read": work.read(SIZE, CHUNKS, is_by_channel=True),
        "read_back": work.read_back(SIZE, CHUNKS),
        "carry_gradients": work.carry_gradients(SIZE, CHUNKS, erases=False),
        "d_scores_of": work.d_scores_of(SIZE, CHUNKS),
        "channel_gradient": work.channel_gradient(SIZE, CHUNKS),
        "d_queries": work.d_queries(SIZE, CHUNKS),
        "d_keys_of": work.d_keys_of(SIZE, CHUNKS),
    },
    "kda": {
        "channel_scores": work.channel_scores(SIZE, CHUNKS, erases=True),
        "channel_gradient": work.channel_gradient(SIZE, CHUNKS, erases=True),
        "prepare": [
            work.prepare(SIZE, CHUNKS, is_by_channel=True, is_backward=again)
            for again in (False, True)
        ],
        "carry_states": work.carry_states(SIZE, CHUNKS),
        "read": work.read(SIZE, CHUNKS, is_by_channel=True),
        "carry_gradients": work.carry_gradients(SIZE, CHUNKS),
        "d_scores_of": work.d_scores_of(SIZE, CHUNKS),
        "d_written": work.d_written(SIZE, CHUNKS),
        "d_queries": work.d_queries(SIZE, CHUNKS),
        "d_keys_of": work.d_keys_of(SIZE, CHUNKS, erases=True),
    },
}
"""The work of a kernel, or of its launch forward and that of the gradient."""
WIDER = (
    *("lucid_update", "lucid_update_with_sums", "lucid_gradient"),
    *("laser_forward", "laser_query_gradient", "laser_key_gradient"),
    *("path_forward", "path_carry", "path_query_gradient"),
)
TWICE = {
    "lucid_solve": {"substitute"},
    "gated_delta": {"carry_states"},
    "gla": {"channel_scores", "carry_states"},
    "kda": {"channel_scores", "carry_states"},
}
"""Kernels that the gradient launches again."""


def products_of(mechanism, of_heads=1):
    """FLOPs of all products of a call and its gradient in bfloat16, by kernel."""
    torch.manual_seed(0)
    m = pa.parse(mechanism)
    _, t, d, e = SIZE
    widths = {"k": d, "q": d, "v": e, "w": d}
    if mechanism in ("gla", "kda"):
        widths["g"] = d
    x = {
        name: torch.randn(1, t, HEADS, *([widths[name]] if name in widths else [])).bfloat16()
        for name in m.inputs
    }
    if "g" in x:
        x["g"] = -x["g"].abs().float()
    if "beta" in x:
        x["beta"] = x["beta"].sigmoid()
    x = {name: array.requires_grad_() for name, array in x.items()}
    tiles = dict.fromkeys(WIDER, WIDE)
    with small_tiles(**tiles), counted_products(of_heads) as counted:
        out = m(**x, backend=Triton.name)
        out.backward(torch.ones_like(out))
    return counted


@pytest.mark.thorough
@pytest.mark.parametrize("mechanism", sorted(STATED))
def test_the_stated_products_are_those_that_the_interpreter_counts(mechanism, monkeypatch):
    monkeypatch.setattr(solve, "processors", lambda _: 1)
    monkeypatch.setattr("precondattn_triton.path.blocks.SMALLEST", 32)
    counted = products_of(mechanism)
    for name, stated in STATED[mechanism].items():
        times = 2 if name in TWICE.get(mechanism, ()) else 1
        works = stated if isinstance(stated, list) else times * [stated]
        assert counted[name] == sum(each.half + each.tf32 for each in works), name


@pytest.mark.thorough
@pytest.mark.parametrize("mechanism", sorted(STATED))
def test_the_programs_of_one_head_count_for_all_heads(mechanism, monkeypatch):
    monkeypatch.setattr("precondattn_triton.path.blocks.SMALLEST", 32)
    assert products_of(mechanism, of_heads=HEADS) == products_of(mechanism)


@pytest.mark.parametrize("call", ["laser", "gla", "path"])
def test_the_predicted_products_are_those_counted_in_whole_calls(call):
    """The others are predicted for another number of heads, or have kernels in two versions."""
    measurements = DOCS / "measurements"
    rows = json.loads((measurements / "predictions" / "triton.json").read_text())["kernels"]
    counted = json.loads((measurements / "host" / "products.json").read_text())["now"]
    of_call = counted[f"{call} 8192 forward and backward"]
    checked = 0
    for row in rows:
        if (row["call"], row["width"], row["tokens"]) == (call, 128, 8192):
            times = 2 if row["kernel"] in TWICE.get(call, ()) else 1
            assert of_call[row["kernel"]] == times * row["flops"], row["kernel"]
            checked += 1
    assert checked >= 3


def test_the_roof_is_the_longest_of_three_times():
    products = KernelWork("", (132,), 989e9, 0, 0, 1e6, 1e6)
    assert roof(products, H100).limit == "tensor cores"
    assert roof(products, H100).seconds == pytest.approx(1e-3)
    moving = KernelWork("", (132,), 1e9, 1e9, 1e6, 3.35e9, 1e10)
    assert roof(moving, H100).limit == "bandwidth"
    assert roof(moving, H100).seconds == pytest.approx(1e-3)
    special = KernelWork("", (132,), 1e9, 1e9, H100.special, 1e6, 1e6)
    assert roof(special, H100).limit == "exponentials"
    assert roof(special, H100).seconds == pytest.approx(1)


def test_a_grid_of_one_program_too_many_takes_a_second_turn():
    full, over = (KernelWork("", (n,), 989e9, 0, 0, 0, 0) for n in (264, 265))
    assert filled(full, H100, resident=2) == 1
    assert filled(over, H100, resident=2) == pytest.approx(265 / 528)
    assert predicted(full, H100, 0.5, 2) == pytest.approx(2e-3 + 3e-6)

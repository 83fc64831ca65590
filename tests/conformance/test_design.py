"""The design: every pair of levels has a row, and some rows run."""

import itertools
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from precondattn_conformance.cases import designed
from precondattn_conformance.checks.ragged import calls, rows_of
from precondattn_conformance.design.covering import CoveringArray
from precondattn_conformance.design.dense import DENSE
from precondattn_conformance.design.factors import APART, FACTORS, TRIPLES
from precondattn_conformance.design.levels import DRAWN, JAX_ROWS, rows
from precondattn_conformance.design.options import options_of, together
from precondattn_conformance.design.rows import design
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import FAILED, PASSED


def levels_of(made, factor):
    return [level for name, level in made.array.names if name == factor]


def pairs_in(rows):
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def test_every_pair_and_every_triple_that_goes_together_is_in_a_row():
    levels = {"a": "0123", "b": "012", "c": "01", "d": "01234"}

    def goes(one, other):
        return {one, other} != {("a", "0"), ("b", "1")}

    made = CoveringArray({f: tuple(chosen) for f, chosen in levels.items()}, goes, ("a", "b", "c"))
    wanted = {
        ((f, x), (g, y))
        for f, g in combinations(levels, 2)
        for x in levels[f]
        for y in levels[g]
        if goes((f, x), (g, y))
    }
    assert pairs_in(made.pair_rows) == wanted
    triples = {(row["a"], row["b"], row["c"]) for row in made.rows}
    assert len(triples) == 4 * 3 * 2 - 2
    assert len(made.pair_rows) <= 25


@pytest.mark.parametrize("mechanism", ["softmax", "lucid", "gated_delta", "lucid(path)"])
def test_a_mechanisms_rows_have_every_pair_and_nothing_that_is_apart(mechanism):
    made = design(mechanism, "torch")
    rows = made.array.rows
    apart = {((a, x), (b, y)) for a, levels, b, others in APART for x in levels for y in others}
    for row in rows:
        assert not apart.intersection(itertools.permutations(row.items(), 2))
    present = {level for row in rows for level in row.items()}
    for factor in ("time", "mask", "batch", "d", "e", "order", "dtype"):
        assert {level for f, level in present if f == factor} == set(FACTORS[factor])
    if made.is_whole:
        pairs = pairs_in(made.array.pair_rows)
        for factors in combinations(TRIPLES, 3):
            found = {tuple((f, row[f]) for f in factors) for row in rows}
            together = itertools.product(*([(f, x) for x in levels_of(made, f)] for f in factors))
            missing = [
                triple
                for triple in together
                if all(pair in pairs for pair in combinations(triple, 2)) and triple not in found
            ]
            # Three pairwise compatible levels need not be compatible together.
            assert len(missing) < 0.02 * len(found), missing


def test_the_first_rows_have_as_many_of_their_levels_as_go_together_and_are_in_smoke():
    levels = {"a": "012", "b": "012", "c": "01"}
    first = [{"a": "1", "b": "2", "c": "1"}, {"c": "0", "unknown": "level", "b": "0"}]
    made = CoveringArray(
        {f: tuple(chosen) for f, chosen in levels.items()},
        lambda one, other: {one, other} != {("b", "2"), ("c", "1")},
        first=first,
    )
    assert made.first == [{"a": "1", "b": "2", "c": "0"}, {**made.first[1], "b": "0", "c": "0"}]
    assert made.pair_rows[:2] == made.first
    whole = design("gated_delta", "torch")
    assert rows("smoke", "gated_delta", "torch") == whole.array.first
    assert len(whole.array.first) > len(DENSE)
    assert len(rows("smoke", "ccq(gla)", "torch")) < 4
    assert rows("full", "gated_delta", "torch") == whole.array.rows
    assert len(rows("full", "gated_delta", "jax")) == JAX_ROWS


@pytest.mark.parametrize("mechanism", ["softmax", "gated_delta"])
def test_smoke_has_masks_widths_views_lengths_and_options_in_pairs(mechanism):
    chosen = designed("smoke", mechanism, "torch")
    layouts = [case.layout for case in chosen]
    assert any("+" in (layout.mask or "") and layout.b == 3 for layout in layouts)
    assert any(layout.e > 2 * layout.d for layout in layouts)
    assert any(layout.d > 128 for layout in layouts)
    assert any(layout.s > 1024 for layout in layouts)
    assert any(layout.t < layout.s - 16 for layout in layouts)
    assert {"expanded_batch", "expanded_heads"} <= {layout.order for layout in layouts}
    assert any(c.check == "caching" and c.layout.has("lengths") for c in chosen)
    if mechanism == "softmax":
        window = {case.mechanism for case in chosen if "window=22" in case.mechanism}
        assert {"softmax[window=22,bias=true]", "softmax[window=22,sink=true]"} <= window


def test_rows_are_drawn_from_all_levels_and_no_small_row_is_drawn_more_often():
    made = design("softmax", "torch")
    drawn = made.array.drawn(10 * DRAWN)
    assert made.array.drawn(DRAWN) == made.array.drawn(DRAWN)
    for factor in ("verb", "time", "mask", "heads", "block", "batch", "e", "order", "dtype"):
        count = Counter(row[factor] for row in drawn)
        assert set(count) == set(levels_of(made, factor)), factor
        assert max(count.values()) < 0.7 * len(drawn), factor
    assert max(Counter(map(str, drawn)).values()) == 1
    layouts = [made.case(row).layout for row in drawn]
    assert sum(layout.t * layout.b * layout.h > 100 for layout in layouts) > len(drawn) / 2


def test_options_go_together_in_pairs_unless_the_mechanism_refuses_them():
    options = options_of("softmax")
    both = together("softmax", "softmax[bias=true]", "softmax[window=3]")
    assert both == "softmax[window=3,bias=true]"
    assert together("softmax", "softmax[window=3]", options[-1]) is None  # Two windows.
    assert "lucid(softmax[softcap=2])" in options_of("lucid")


def test_declared_blocks_place_the_levels():
    made = {case.layout.t for case in designed("full", "softmax", "numpy", (48,))}
    assert {47, 48, 49, 97, 149} <= made
    assert not {63, 65, 129} & made


def test_each_sequence_of_a_ragged_batch_gets_its_tokens_and_the_first_is_not_the_longest():
    layout = CallLayout("x", b=3, t=9, s=9, mask="lengths")
    lengths = layout.masks()["lengths"]
    assert lengths.argmax() == 2
    made = calls(layout, [3, 4, 5, 9])
    np.testing.assert_array_equal(sum(call.counts for call in made), lengths)
    assert any(0 < call.counts[0] != call.counts[2] for call in made[1:])
    tokens = np.broadcast_to(np.arange(9.0)[None, :, None], (3, 9, 1))
    seen = [rows_of(tokens, call)[0, : call.counts[0], 0] for call in made]
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(lengths[0]))


@pytest.mark.parametrize(
    ("backend", "mechanism"),
    [
        *(("reference", mechanism) for mechanism in ("softmax", "differential")),
        *(("portable", mechanism) for mechanism in ("lucid", "gated_delta", "gla", "laser")),
        *(("torch", mechanism) for mechanism in ("softmax", "path")),
    ],
)
def test_the_rows_of_smoke_pass(backend, mechanism):
    library = "torch" if backend == "torch" else "numpy"
    outcomes = [run_case(case, backend) for case in designed("smoke", mechanism, library)]
    assert not [f"{o.case.id}: {o.reason}" for o in outcomes if o.status == FAILED]
    assert any(o.status == PASSED for o in outcomes)

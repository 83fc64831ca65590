"""The suite's cases and their ids, its data, and its errors."""

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.cases import case_of, cases, designed
from precondattn_conformance.checks import CHECK, Check
from precondattn_conformance.declared import compositions
from precondattn_conformance.design.levels import DRAWN
from precondattn_conformance.design.rows import design
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.layout_names import layout_named
from precondattn_conformance.memory import held_bytes
from precondattn_conformance.oracle import oracle
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import PASSED, UNSUPPORTED
from precondattn_conformance.tolerance import error

# Cases.


def test_every_preconditioner_around_every_mechanism_is_declared_or_refused_with_a_reason():
    result = compositions()
    assert {"lucid(path)", "differential(laser)", "row_normalized(lucid)"} <= {
        expression for expression, refused in result.items() if refused is None
    }
    assert "mean of its values" in result["laser(lucid)"]
    assert "no other preconditioner has used" in result["lucid(lucid)"]


def test_ids_are_unique_and_give_their_cases_back():
    some = ("softmax", "softmax[window=3]", "lucid", "lucid(laser)", "lucid(softmax[bias=true])")
    ids = [case.id for case in cases("full", only_mechanisms=some)]
    assert len(ids) == len(set(ids))
    assert "outputs-numpy-float64-plain-clustered-lucid(laser)" in ids
    named = cases("smoke", only_mechanisms=("lucid(path)",), only_libraries=("numpy",))
    for case in (*named, *designed("full", "lucid", "numpy")):
        assert case_of(case.id) == case
    made = design("lucid", "numpy")
    layouts = [made.case(row).layout for row in made.array.drawn(DRAWN)]
    assert all(layout_named(layout.name) == layout for layout in layouts)
    assert layout_named("b1t9s9h1n1d2e1.sideways") is None
    assert layout_named("b01t9s9h1n1d2e1") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("outputs-numpy", "is no case"),
        ("output-numpy-float64-plain-random-lucid", "'output' is no check"),
        ("outputs-numpy-float64-plane-random-lucid", "'plane' is no layout"),
        ("outputs-numpy-float64-plain-rand-lucid", "'rand' is no kind of keys"),
        ("outputs-numpy-float64-plain-random-lucidity", "lucidity"),
        ({"level": "huge"}, "level must be one of smoke, full, stress; found 'huge'"),
        ({"only_checks": ("speed",)}, "'speed' is no check; there are outputs"),
        ({"only_dtypes": ("float8",)}, "'float8' is no dtype"),
        ({"only_libraries": ("tinygrad",)}, "'tinygrad' is no installed array library"),
        ({"only_mechanisms": ("lucit",)}, "unknown mechanism 'lucit'"),
    ],
)
def test_an_invalid_id_or_choice_is_refused_with_its_wrong_part(text, reason):
    with pytest.raises(ValueError, match=reason):
        case_of(text) if isinstance(text, str) else list(cases(**text))


def test_every_check_is_explained():
    page = Path(__file__).parents[2].joinpath("docs/conformance.md").read_text()
    for each in CHECK.values():
        assert f"\n### {each.name}\n" in page
        assert (each.__doc__ or "").strip() not in ("", Check.__doc__.strip())


@pytest.mark.parametrize(
    "name",
    [
        # The norm of a row without visible keys is so small that the division overflows float16.
        "gradients-torch-float16-masked-clustered-row_normalized",
        # A gradient beyond float16's range, for which infinity is correct.
        "gradients-torch-float16-plain-zero-lucid(qk_norm[gain=true])",
        # Sums whose terms cancel.
        "gradients-torch-float32-block_and_one-clustered-temperature[per=head]",
        "gradients-torch-bfloat16-real_short-real-differential",
        # PyTorch refused to write a view of the scores to themselves.
        "caching-torch-float32-b1t63s63h1n1d16e16block64.lengths_apart-random-lucid(softmax[window=70])",
        # The same layout with a key mask.
        "caching-torch-float64-b3t65s65h4n2d16e24block32.lengths_apart+key_blocks-random-lucid(softmax[window=38])",
    ],
)
def test_cases_that_failed_before_pass(name):
    pytest.importorskip("torch")
    result = run_case(case_of(name), "torch")
    assert result.status == PASSED, result.text


def test_a_third_party_backend_is_compared_on_what_it_claims(third_party):
    solves = cases("smoke", only_mechanisms=("lucid_solve",), only_libraries=("numpy",))
    outcomes = [run_case(case, "third_party") for case in solves if case.dtype == "float64"]
    assert {each.status for each in outcomes} == {PASSED, UNSUPPORTED}
    assert sum(each.status == PASSED for each in outcomes) > 15
    layout, helped = CallLayout("helped"), ("third_party", "reference")
    # A backend that runs nothing itself has no coverage.
    result = run_case(Case("outputs", "laser", "numpy", "float64", layout, "random"), helped)
    assert result.status == UNSUPPORTED
    assert "third_party supports none of this" in result.reason
    result = run_case(Case("outputs", "lucid(laser)", "numpy", "float64", layout, "random"), helped)
    assert result.status == PASSED


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="regions can not be counted here")
def test_jaxs_compilation_cache_is_cleared_before_a_process_has_too_many_memory_regions(
    monkeypatch,
):
    pytest.importorskip("jax")
    case = case_of("outputs-jax-float64-plain-random-softmax")
    run_case(case, "reference")
    with_it = libraries.mapped_regions()
    assert run_case(case, "reference").status == PASSED
    assert libraries.mapped_regions() == with_it
    monkeypatch.setattr(libraries, "MOST_REGIONS", 0)
    libraries.named("jax").forget()
    assert libraries.mapped_regions() < with_it - 50


def test_one_wrong_element_fails():
    expected = np.random.default_rng(0).normal(size=(4, 1000))
    result = expected.copy()
    result[2, 500] += 1e-3
    assert error(result, expected) > 1e-4
    assert np.isnan(error(np.full((2, 2), np.nan), np.ones((2, 2))))


def test_the_error_of_a_sum_whose_terms_cancel_is_relative_to_the_terms():
    assert error(np.asarray([1.001]), np.asarray([1.0]), terms=20.0) < 1e-4
    assert error(np.asarray([1.01]), np.asarray([1.0]), terms=20.0) > 1e-4
    layout = CallLayout("cancelling", t=33, s=33)
    result = oracle("temperature[per=head]", layout, "clustered", "float64")
    d_tau = np.max(np.abs(result.gradients["tau"]))
    assert d_tau < result.terms["tau"] < 100 * d_tau
    for expression in ("temperature(path)", "qk_norm(temperature)"):
        assert oracle(expression, layout, "clustered", "float64").terms


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(),
    reason="only Linux reports the memory of a process by kinds of pages; `held_bytes` is 0 here",
)
def test_a_kept_array_is_held_until_it_is_released_whatever_the_system_drops(tmp_path):
    """Pages of a mapped file, such as a library, are dropped when memory is short."""
    library, size = libraries.named("numpy"), 32 << 20
    path = tmp_path / "like_a_library"
    path.write_bytes(bytes(size))
    gc.freeze()  # Each measurement would visit the objects of all tests.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0  # Each page is in memory now.
        before = held_bytes(library)
        kept = np.ones(size, dtype=np.uint8)
        mapped.madvise(mmap.MADV_DONTNEED)
        assert held_bytes(library) - before == pytest.approx(kept.nbytes, rel=0.1)
        del kept
        assert held_bytes(library) - before < size / 10
    gc.unfreeze()

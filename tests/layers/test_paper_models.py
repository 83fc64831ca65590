"""The page `docs/paper_models.md`: our models with the sizes of the papers' and their numbers."""

import pytest

pytest.importorskip("torch")

import make_paper_models
from paper_models import PAPERS, laser, lucid


@pytest.mark.thorough
def test_the_page_is_up_to_date():
    written = make_paper_models.PAGE.read_text(encoding="utf-8")
    assert written == make_paper_models.page(), "run python docs/make_paper_models.py"


@pytest.mark.parametrize(("mlp", "maps"), [("plain", 2), ("gated", 3)])
def test_counts_are_those_of_the_maps_the_norms_and_the_embedding(mlp, maps):
    layers, width, heads, head, hidden = 32, 3440, 16, 720, 11584
    block = 4 * width * heads * head + maps * width * hidden + 2 * width
    expected = layers * block + width + 32_000 * width
    arguments = laser(layers, width, heads, head, hidden, mlp)
    assert make_paper_models.count(arguments) == expected
    of_heads = 2 * 2048 * 68 * (32 + 4)  # Few key heads make smaller maps.
    expected = 22 * (of_heads + 3 * 2048 * 5632 + 2 * 2048) + 2048 + 32_000 * 2048
    arguments = lucid('"mechanism": "lucid", "kv_heads": 4, "head_dim": 68')
    assert make_paper_models.count(arguments) == expected


@pytest.mark.thorough
def test_only_one_stated_number_does_not_fit():
    stated = [model for paper in PAPERS for model in paper.models if model.stated]
    counts = {model.name: make_paper_models.count(model.arguments) for model in stated}
    misfits = [m.name for m in stated if not make_paper_models.fits(counts[m.name], m.stated)]
    assert misfits == ["Figure 5, width 1,024"]


@pytest.mark.parametrize(
    ("counted", "stated", "is_fit"),
    [(1_149_999_999, "1.1B", True), (1_150_000_001, "1.1B", False), (474_375_546, "500M", True)],
)
def test_a_number_fits_if_it_rounds_to_the_stated_one(counted, stated, is_fit):
    assert make_paper_models.fits(counted, stated) is is_fit

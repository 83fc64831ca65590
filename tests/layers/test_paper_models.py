"""The page `docs/paper_models.md`: our models with the sizes of the papers' and their numbers."""

import pytest

pytest.importorskip("torch")

from make_pages import DOCS, MODEL, count, fits, with_sizes

PAGE = DOCS / "paper_models.md"
MODELS = MODEL.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.thorough
def test_the_page_is_up_to_date():
    assert len(MODELS) == 24
    assert PAGE.read_text(encoding="utf-8") == with_sizes(PAGE), "run python docs/make_pages.py"


@pytest.mark.parametrize(("mlp", "maps"), [("plain", 2), ("gated", 3)])
def test_counts_are_those_of_the_maps_the_norms_and_the_embedding(mlp, maps):
    layers, width, heads, head, hidden = 32, 3440, 16, 720, 11584
    block = 4 * width * heads * head + maps * width * hidden + 2 * width
    layer = {"mechanism": "laser", "head_dim": head}
    model = f"Decoder(32_000, {width}, heads={heads}, layers=[{layer}] * {layers}, hidden={hidden}"
    assert count(f'{model}, mlp="{mlp}")') == layers * block + width + 32_000 * width
    of_heads = 2 * 2048 * 68 * (32 + 4)  # Few key heads make smaller maps.
    layer = {"mechanism": "lucid", "kv_heads": 4, "head_dim": 68}
    model = f"Decoder(32_000, 2048, heads=32, hidden=5632, layers=[{layer}] * 22)"
    expected = 22 * (of_heads + 3 * 2048 * 5632 + 2 * 2048) + 2048 + 32_000 * 2048
    assert count(model) == expected


@pytest.mark.thorough
def test_only_one_stated_number_does_not_fit():
    misfits = [name for name, call, stated in MODELS if stated and not fits(count(call), stated)]
    assert misfits == ["Figure 5, width 1,024"]


@pytest.mark.parametrize(
    ("counted", "stated", "is_fit"),
    [(1_149_999_999, "1.1B", True), (1_150_000_001, "1.1B", False), (474_375_546, "500M", True)],
)
def test_a_number_fits_if_it_rounds_to_the_stated_one(counted, stated, is_fit):
    assert fits(counted, stated) is is_fit

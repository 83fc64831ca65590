"""The model of many devices against closed forms, and the page that shows it."""

import dataclasses
import runpy
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import many_devices_model

    return many_devices_model


@pytest.fixture
def ideal(model):
    """Links without limit, no latency, and full use of a device."""
    return model.Constants(tiles=0, near=1e99, far=1e99, message=0, launch=0)


@pytest.mark.parametrize("devices", [2, 8, 64])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "cyclic"])
def test_counted_idle_work_is_the_closed_form(model, layout, devices):
    counted = model.idle_share(layout, 2**14, devices, 16)
    assert counted == pytest.approx(model.closed_idle_share(layout, 2**14, devices, 16), abs=1e-12)


def test_contiguous_idles_half_and_zigzag_never(model):
    assert model.idle_share("contiguous", 2**20, 2**10) == pytest.approx(0.5, abs=1e-3)
    assert model.idle_share("zigzag", 2**20, 2**10) == 0


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "cyclic"])
def test_one_device_takes_the_time_of_its_work(model, ideal, layout):
    tokens, block = 2**14, 256
    run = model.pipelined(ideal, tokens, 1, layout, block)
    # What is beside the pairs of solve and attention: the inverses of diagonal blocks.
    inverses = ideal.compute(tokens * block / 6 / ideal.width, ideal.kv_heads, tokens)
    pairs = ideal.compute(tokens**2 / 2, ideal.heads + ideal.kv_heads, tokens)
    assert run.seconds == pytest.approx(inverses + pairs)
    assert run.busy == pytest.approx(1)


def test_a_balanced_ring_has_a_share_of_the_work(model, ideal):
    alone = model.ring(ideal, 2**16, 1, "contiguous")
    assert model.ring(ideal, 2**16, 8, "zigzag") == pytest.approx(alone / 8)
    assert model.ring(ideal, 2**16, 8, "contiguous") == pytest.approx(alone * 15 / 64)
    assert model.by_heads(ideal, 2**16, 8) == pytest.approx(alone / 8)
    assert model.by_heads(ideal, 2**16, 64) is None  # More than heads.


def test_cyclic_blocks_approach_a_share_of_the_work(model, ideal):
    alone = model.pipelined(ideal, 2**16, 1, "cyclic", 64).seconds
    runs = [model.pipelined(ideal, 2**16, 8, "cyclic", b).seconds for b in (64, 512, 4096)]
    assert alone / 8 <= runs[0] < 1.02 * alone / 8
    assert runs[0] < runs[1] < runs[2]


def test_latency_of_the_chain_bounds_the_pipeline(model, ideal):
    slow = dataclasses.replace(ideal, message=1.0)
    run = model.pipelined(slow, 2**12, 8, "cyclic", 64)
    hops = 3 * (2**12 // 64 - 1)  # Each block but the last goes to the next owner.
    assert run.seconds == pytest.approx(hops, rel=1e-4)
    assert np.all(run.idle_by_device > 0.9)
    # Contiguous tokens wait for 7 blocks only.
    assert model.pipelined(slow, 2**12, 8, "contiguous", 64).seconds == pytest.approx(21, rel=1e-4)


def test_the_saved_simulation_is_the_models_and_the_page_shows_it(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    maker = runpy.run_path(str(DOCS / "make_many_devices.py"))
    saved = maker["load"](maker["RECORD"])
    c = maker["Constants"]()
    assert saved["constants"] == dataclasses.asdict(c), "run python docs/make_many_devices.py"
    for row in saved["rows"]:
        for plan, times in maker["plans"](c, row["tokens"], row["devices"]).items():
            assert times == pytest.approx(row["plans"][plan]), plan
    (small,) = (r for r in saved["rows"] if (r["tokens"], r["devices"]) == (2**17, 64))
    for layout, found in maker["solves"](c, 2**17, 64).items():
        assert found["seconds"] == pytest.approx(small["solves"][layout]["seconds"])
    assert maker["PAGE"].read_text(encoding="utf-8") == maker["page"](saved), (
        "run python docs/make_many_devices.py --draw"
    )


def test_the_page_on_lucid_shows_the_saved_run(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(DOCS)
    maker = runpy.run_path(str(DOCS / "measure_divided_lucid.py"))
    saved = maker["load"](maker["FILE"])
    assert maker["PAGE"].read_text(encoding="utf-8") == maker["page"](saved), (
        "run python docs/measure_divided_lucid.py --draw"
    )

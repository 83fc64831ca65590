"""Every row of the page *Export* in onnxruntime: full calls, steps, masks, its code."""

import doctest
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import torch

import precondattn as pa
from tests.core.exported import (
    CAPACITY,
    CLOSE,
    EMPTY,
    ExportedCall,
    InOnnxruntime,
    any_size,
    exported_call,
    exported_step,
    extension_of,
    first_of,
    masks_of,
    own_operators,
    prefilled,
    tensors_of,
)

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
EXPORTED, MASKED = (
    re.findall(r"^\| (.*) \| (.*) \|$", PAGE.split(heading)[1].split("\n#")[0], re.MULTILINE)[2:]
    for heading in ("### Mechanisms\n", "### Masks\n")
)
CODE = re.compile(r"`([^`]*)`")
CALLS = [expression for row, _ in EXPORTED for expression in CODE.findall(row)]
STEPS = [text for row, step in EXPORTED if step == "yes" for text in CODE.findall(row)]
WITH_MASKS = [
    (mask, expression)
    for masks, expressions in MASKED
    for mask in CODE.findall(masks)
    for expression in CODE.findall(expressions)
]

pytestmark = [
    pytest.mark.thorough,
    # PyTorch's exporter uses what PyTorch deprecates.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

IN_SECOND_TIER = {
    *("row_normalized", "lucid", "ccq(gated_delta)"),
}


def all_but_a_few_slow(rows):
    """Parameters for rows whose last entry is an expression."""
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    slow = {row for row in rows if row[-1] not in IN_SECOND_TIER or row[1:] == ("lucid",)}
    return [pytest.param(*row, marks=[pytest.mark.slow] * (row in slow)) for row in rows]


def assert_computes(out, m, x, **masks):
    """The error is at most PyTorch's: a system close to singular amplifies rounding errors."""
    exact = m(**{name: array.double() for name, array in x.items()}, **masks)
    rounded = float((m(**x, **masks) - exact).abs().max())
    bounds = CLOSE | {"atol": max(CLOSE["atol"], 2 * rounded)}
    torch.testing.assert_close(out, exact.float(), **bounds)


def test_the_page_names_every_mechanism():
    named = {pa.parse(text).name for text in CALLS}
    ours = {n for n, c in pa.mechanisms().items() if c.__module__.startswith("precondattn.")}
    assert ours <= named
    assert {text for text in CALLS if pa.parse(text).offers.causal} == {*STEPS}


@pytest.mark.parametrize("expression", all_but_a_few_slow(CALLS))
def test_onnxruntime_computes_a_call_of_any_batch_and_length(expression):
    m = pa.parse(expression)
    program = exported_call(m)
    assert not own_operators(program)
    run = InOnnxruntime(program)
    for b, t in [(3, 37), (1, 1)]:  # 37 tokens are no multiple of a block.
        x = tensors_of(m, b, t, seed=1)
        (out,) = run(*x.values())
        assert_computes(out, m, x)
    for b, t in EMPTY:
        x = first_of(tensors_of(m, 2, 6), any_size(m), b, t)
        torch.testing.assert_close(run(*x.values())[0], m(**x))


@pytest.mark.parametrize("expression", all_but_a_few_slow(STEPS))
def test_onnxruntime_computes_a_step_of_decoding_of_any_batch(expression):
    m = pa.parse(expression)
    program = exported_step(m, prefilled(m), extension_of(m, 2))
    assert not own_operators(program)
    cache, x = prefilled(m, 3), extension_of(m, 3, seed=1)
    out, length, *store = InOnnxruntime(program)(cache.length, *cache.store.values(), *x.values())
    expected, extended = m.extend(cache, **x)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert torch.equal(length, extended.length)
    for found, (name, buffer) in zip(store, extended.store.items(), strict=True):
        # Slots after the last token have no meaning.
        used = (
            slice(None) if buffer.ndim < 2 or buffer.shape[1] != CAPACITY else slice(int(length[0]))
        )
        torch.testing.assert_close(found[:, used], buffer[:, used], **CLOSE, msg=name)


@pytest.mark.parametrize(("mask", "expression"), all_but_a_few_slow(WITH_MASKS))
def test_onnxruntime_computes_a_call_with_masks(mask, expression):
    m, names = pa.parse(expression), mask.split(", ")
    run = InOnnxruntime(exported_call(m, *names))
    for b, t in [(3, 37), (1, 1)]:
        x, masks = tensors_of(m, b, t, seed=1), masks_of(names, b, t)
        (out,) = run(*x.values(), *masks.values())
        assert_computes(out, m, x, **masks)


@pytest.mark.parametrize("t", [4, 40])
def test_a_recurrence_is_one_scan_whatever_the_number_of_tokens(t):
    m = pa.parse("gated_delta")
    with pa.ordinary_operators():
        program = torch.export.export(ExportedCall(m), (tensors_of(m, 2, t), {}))
    nodes = [node.op_type for node in InOnnxruntime(program).model.graph.node]
    assert nodes.count("Scan") == 1
    assert not {"Loop", "If"} & {*nodes}


def test_the_code_of_the_page_for_onnxruntime_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, for_onnxruntime = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.DOTALL)[:2]
    names = {}
    for example in doctest.DocTestParser().get_examples(first):
        exec(example.source, names)
    q, k, v = names["inputs"]
    names |= {"q": q, "k": k, "v": v}
    exec(for_onnxruntime, names)
    torch.testing.assert_close(torch.from_numpy(names["o"]), pa.laser(q, k, v), **CLOSE)

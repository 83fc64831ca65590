"""ATK around a delta rule, computed at once, against its definition and against its pieces."""

import math

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra.group import group_of, read_program
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_portable import chunkwise
from precondattn_portable.preconditioned_delta import is_preconditioned_delta

CHUNK = chunkwise.CHUNK
GROUP = "y1 = preconditioned_key"
"""The group's name in the plan of a call."""


def inputs(mechanism, s, b=2, h=3, values_per_head=1):
    layout = CallLayout("x", b=b, t=s, s=s, h=h, n=h, d=8, e=6, values_per_head=values_per_head)
    return make_inputs(mechanism, layout, "clustered")


@pytest.mark.parametrize("base", ["delta", "gated_delta", "kda"])
@pytest.mark.parametrize("options", ["", "[learned=true]", "[center=40]", "[bound=1]"])
@pytest.mark.parametrize("s", [CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 17])
def test_it_is_the_definition(base, options, s):
    mechanism = pa.parse(f"atk{options}({base})")
    x = inputs(mechanism, s)
    assert GROUP in str(mechanism.explain(**x))
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(mechanism(**x), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("base", ["gated_delta", "kda"])
def test_strong_gates_and_zero_keys(base):
    mechanism, s = pa.parse(f"atk({base})"), 3 * CHUNK + 5
    x = inputs(mechanism, s)
    for name in ("g", "g_atk"):
        x[name][0, s // 2] = -math.inf
        x[name][1, s // 3 : s // 3 + 20] = -50.0
    x["k"][:, s // 4 : s // 4 + 30] = 0
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(mechanism(**x), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_several_groups_of_chunks(monkeypatch, together):
    mechanism, s = pa.parse("atk(gated_delta)"), 7 * CHUNK + 1
    x = inputs(mechanism, s)
    monkeypatch.setattr(chunkwise, "GROUP", together * 2 * 3 * CHUNK * CHUNK)
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(mechanism(**x), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("options", ["", "[learned=true]"])
def test_a_library_without_places_to_write_to(options):
    strict = pytest.importorskip("array_api_strict")
    mechanism = pa.parse(f"atk{options}(gated_delta)")
    x = inputs(mechanism, 2 * CHUNK + 9)
    expected = mechanism(**x, backend="reference")
    found = mechanism(**{name: strict.asarray(array) for name, array in x.items()})
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-10, atol=1e-13)


def test_more_chunks_of_keys_than_one_block_has():
    mechanism, s = pa.parse("atk(gated_delta)"), 20 * CHUNK + 3
    x = inputs(mechanism, s, b=1, h=1)
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(mechanism(**x), expected, rtol=1e-10, atol=1e-13)


def test_channels_that_no_key_has_filled_with_a_small_eps():
    """e^{−c} ε underflows in float32."""
    mechanism = pa.parse("atk[eps=1e-35,center=30](gated_delta)")
    x = {name: array.astype(np.float32) for name, array in inputs(mechanism, 2 * CHUNK + 2).items()}
    x["k"][:, : CHUNK + 6] = 0
    x["k"][..., 2] = 0
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(mechanism(**x), expected, rtol=1e-4, atol=1e-6)


def test_a_group_that_also_reads_the_made_keys_is_left_alone():
    text = str(group_of("atk(gated_delta)"))
    key, rule = text.split("; ")
    name = key.split(" = ")[0]
    program = read_program(f"{key}; {rule.replace('(q, ', f'(q={name}, ')}")
    assert is_preconditioned_delta(read_program(text))
    assert not is_preconditioned_delta(program)


def test_it_is_what_its_pieces_compute():
    """The group equals its pieces, which compute packed calls, since the group has no masks."""
    mechanism, s = pa.parse("atk(gated_delta)"), 2 * CHUNK
    x = inputs(mechanism, s)
    segment_ids = np.zeros((2, s), dtype=np.int64)
    mask = np.ones((2, s), dtype=bool)
    assert GROUP not in str(mechanism.explain(**x, key_mask=mask))
    by_pieces = mechanism(**x, segment_ids=segment_ids, key_mask=mask)
    np.testing.assert_allclose(mechanism(**x), by_pieces, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("expression", "s", "values_per_head"),
    [("atk(gated_delta)", CHUNK, 1), ("atk(gated_delta)", 200, 2), ("atk(gdn2)", 200, 1)],
)
def test_other_calls_are_computed_by_pieces(expression, s, values_per_head):
    """Calls of few tokens, of several value heads per key head, and with another erase key."""
    mechanism = pa.parse(expression)
    x = inputs(mechanism, s, values_per_head=values_per_head)
    assert GROUP not in str(mechanism.explain(**x))


def test_fewer_queries_than_keys_are_computed_by_pieces():
    mechanism, s = pa.parse("atk(gated_delta)"), 4 * CHUNK + 7
    x = inputs(mechanism, s)
    x["q"] = x["q"][:, -CHUNK - 3 :]
    assert GROUP not in str(mechanism.explain(**x))
    expected = mechanism(**x, backend="reference")
    np.testing.assert_allclose(mechanism(**x), expected, rtol=1e-10, atol=1e-13)


def test_gradients_are_those_of_the_pieces():
    mechanism = pa.parse("atk(gated_delta)")
    assert GROUP not in str(mechanism.explain(**inputs(mechanism, 200), verb="vjp"))

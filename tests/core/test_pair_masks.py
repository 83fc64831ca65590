"""Masks of pairs, `attn_mask` and `prefix`: beside causality, and beside all other masks."""

import math

import numpy as np
import pytest

import precondattn as pa
from precondattn.dispatch.plan import query
from precondattn.frame import Frame
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_portable import layout
from precondattn_portable.attention import HeadGroup

B, T, H, N, D = 2, 150, 4, 2, 8
AT = np.arange(T)
PREFIX = np.array([7, 100])
SEGMENTS = np.stack([AT // 50, (AT >= 90) + 0])
CAUSAL = (AT[:, None] >= AT)[None, None]
NEAR = (abs(AT[:, None] - AT) < 9)[None, None]
SAME = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])[:, None]
STARTS = np.stack([AT // 50 * 50, np.where(AT >= 90, 90, 0)])
FIRST = (PREFIX[:, None] > AT)[:, None, None, :]
FIRST_OF_SEGMENT = ((STARTS + PREFIX[:, None])[:, :, None] > AT)[:, None]
LIBRARIES = ("reference", "portable", "torch", "jax")


def marked():
    """An attn_mask with an empty row, and with keys and tiles that no query may attend to."""
    mask = np.random.default_rng(1).random((B, H, T, T)) > 0.4
    mask[0, 1, 5] = mask[:, :, :, 20:40] = mask[:, :, 128:, :70] = False
    return mask


PAIRS = marked()
CALLS = {
    "attn_mask": ({}, {"attn_mask": PAIRS}, CAUSAL & PAIRS),
    "one for all": ({}, {"attn_mask": PAIRS[:1, :1]}, CAUSAL & PAIRS[:1, :1]),
    "not causal": ({"causal": False}, {"attn_mask": PAIRS}, PAIRS),
    "prefix": ({}, {"prefix": PREFIX}, CAUSAL | FIRST),
    "prefix and window": ({"window": 9}, {"prefix": PREFIX}, (CAUSAL & NEAR) | FIRST),
    "prefix and segments": (
        {"window": 9},
        {"prefix": PREFIX, "segment_ids": SEGMENTS},
        ((CAUSAL & NEAR) | FIRST_OF_SEGMENT) & SAME,
    ),
    "all": (
        {},
        {"prefix": PREFIX, "segment_ids": SEGMENTS, "attn_mask": PAIRS},
        (CAUSAL | FIRST_OF_SEGMENT) & SAME & PAIRS,
    ),
}


@pytest.fixture(scope="module")
def qkv():
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, T, H, D)), *rng.normal(size=(2, B, T, N, D))


def array_of(library):
    if library == "torch":
        return pytest.importorskip("torch").from_numpy
    if library == "jax":
        return pytest.importorskip("jax.numpy").asarray
    return np.asarray


def dense(q, k, v, visible):
    """Softmax attention over the visible pairs, written out; 0 where a query sees nothing."""
    k, v = (np.repeat(a, H // N, axis=2) for a in (k, v))
    scores = np.where(visible, np.einsum("bihd,bjhd->bhij", q, k) * D**-0.5, -np.inf)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-100))
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", weights / np.where(total > 0, total, 1), v)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", CALLS)
def test_a_query_sees_what_all_masks_together_let_it_see(name, library, qkv):
    array = array_of(library)
    options, masks, visible = CALLS[name]
    m, masks = pa.Softmax(**options), {n: array(mask) for n, mask in masks.items()}
    out, pullback = m.vjp(*map(array, qkv), **masks, backend=library)
    np.testing.assert_allclose(np.asarray(out), dense(*qkv, visible), rtol=0, atol=1e-13)
    _, expected = m.vjp(*qkv, **{n: np.asarray(a) for n, a in masks.items()}, backend="reference")
    cotangent = np.random.default_rng(2).normal(size=out.shape)
    gradients = pullback(array(cotangent))
    for input_name, gradient in expected(cotangent).items():
        found = np.asarray(gradients[input_name])
        np.testing.assert_allclose(found, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("library", LIBRARIES[1:])
@pytest.mark.parametrize(
    ("expression", "masks"),
    [
        ("softmax[window=9]", ()),
        ("softmax[window=9]", ("segment_ids",)),
        ("softmax[window=9]", ("lengths", "attn_mask")),
        ("softmax[window=9,causal=false]", ("key_mask",)),
        ("softmax[window=9,bias=true,sink=true]", ("segment_ids",)),
        ("laser(softmax[window=9])", ("lengths",)),
    ],
)
def test_a_window_far_from_its_prefix(library, expression, masks):
    array, m, rng = array_of(library), pa.parse(expression), np.random.default_rng(4)
    b, t, s = 2, 570, 600
    at = np.arange(s)
    every = {
        "segment_ids": np.stack([at // 400, (at >= 100) + 0]),
        "lengths": np.array([600, 511]),
        "key_mask": np.stack([at % 7 != 0, at % 500 > 3]),
        "attn_mask": (at % 6 != at[:t, None] % 6)[None, None],
    }
    t = s if "segment_ids" in masks else t
    sizes = {"b": b, "t": t, "s": s, "h": 2, "n": 1, "d": 4, "e": 4}
    x = {name: rng.normal(size=pattern.shape(sizes)) for name, pattern in m.inputs.items()}
    given = {"prefix": np.array([5, 40]), **{name: every[name] for name in masks}}
    expected, pull = m.vjp(**x, **given, backend="reference")
    named = {name: array(a) for name, a in {**x, **given}.items()}
    out, pullback = m.vjp(**named, backend=library)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=0, atol=1e-12)
    cotangent = rng.normal(size=expected.shape)
    found = pullback(array(cotangent))
    for name, gradient in pull(cotangent).items():
        np.testing.assert_allclose(np.asarray(found[name]), gradient, rtol=0, atol=1e-11)


def test_padding_hides_a_prefix_and_is_zero(qkv):
    lengths = np.array([150, 60])
    out = pa.softmax(*qkv, prefix=PREFIX, lengths=lengths)
    short = [a[1:, :60] for a in qkv]
    np.testing.assert_allclose(out[1:, :60], pa.Softmax(causal=False)(*short), atol=1e-13)
    np.testing.assert_array_equal(out[1, 60:], 0)


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient(qkv):
    out, pullback = pa.Softmax().vjp(*qkv, attn_mask=PAIRS)
    np.testing.assert_array_equal(out[0, 5, 1], 0)
    assert np.abs(out[0, 5, 0]).max() > 0
    np.testing.assert_array_equal(pullback(np.ones_like(out))["q"][0, 5, 1], 0)


def test_each_packed_sequence_has_its_own_prefix(qkv):
    q, k, v = (a[:1] for a in qkv)
    out = pa.softmax(q, k, v, cu_seqlens=[0, 50, 140], prefix=[10, 20])
    for start, stop, prefix in ((0, 50, 10), (50, 140, 20)):
        own = pa.softmax(*(a[:, start:stop] for a in (q, k, v)), prefix=[prefix])
        np.testing.assert_allclose(out[:, start:stop], own, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(out[:, 140:], 0)


def test_fewer_queries_than_keys_see_the_same(qkv):
    q, k, v = qkv
    masks = {"prefix": PREFIX, "segment_ids": SEGMENTS}
    whole = pa.softmax(q, k, v, **masks, attn_mask=PAIRS)
    last = pa.softmax(q[:, 140:], k, v, **masks, attn_mask=PAIRS[:, :, 140:])
    np.testing.assert_allclose(last, whole[:, 140:], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "expression",
    [
        "laser",
        "differential",
        "temperature(laser)",
        "qk_norm",
        "row_normalized",
        "softmax[sink=true]",
    ],
)
def test_what_is_around_softmax_has_masks_of_pairs_too(expression, qkv):
    m, rng = pa.parse(expression), np.random.default_rng(3)
    sizes = {"b": B, "t": T, "s": T, "h": H, "n": N, "d": D, "e": D}
    x = {name: 0.1 + rng.random(pattern.shape(sizes)) for name, pattern in m.inputs.items()}
    masks = {"prefix": PREFIX, "attn_mask": PAIRS}
    expected, pullback = m.vjp(**x, **masks, backend="reference")
    assert np.abs(expected - m(**x)).max() > 0.01
    out, pull = m.vjp(**x, **masks)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
    for name, gradient in pullback(np.ones_like(out)).items():
        np.testing.assert_allclose(pull(np.ones_like(out))[name], gradient, rtol=0, atol=1e-11)


@pytest.mark.parametrize("library", LIBRARIES)
def test_prefill_and_decoding_agree_with_the_full_call(library, qkv):
    array = array_of(library)
    q, k, v = (array(a) for a in qkv)
    m, prefix = pa.Softmax(), array(PREFIX)
    expected = np.asarray(m(q, k, v, prefix=prefix, backend=library))
    cache, outs, start = m.init_cache(q, k, v, capacity=T), [], 0
    for count in (120, 1, 29):
        new = (a[:, start : start + count] for a in (q, k, v))
        # Later tokens see the prefix, whether it is given or not.
        masks = {"prefix": prefix} if start != 120 else {}
        out, cache = m.extend(cache, *new, **masks, backend=library)
        outs.append(np.asarray(out))
        start += count
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, rtol=0, atol=1e-13)


def entries(monkeypatch, call):
    """How many scores the row blocks of a call have."""
    found, row_block = [], HeadGroup.row_block

    def counted(group, tile):
        scores = row_block(group, tile)
        found.append(math.prod(scores.shape))
        return scores

    monkeypatch.setattr(HeadGroup, "row_block", counted)
    call()
    return sum(found)


def test_blocks_that_are_masked_as_a_whole_are_not_computed(monkeypatch):
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1024, 1, 4))
    causal = entries(monkeypatch, lambda: pa.softmax(q, k, v))
    # Two blocks of 128 rows see 256 keys, and not 128 and 256: one block more.
    assert entries(monkeypatch, lambda: pa.softmax(q, k, v, prefix=[256])) == causal + 128 * 128
    block = np.arange(1024) // 128
    own = (block[:, None] == block)[None, None]
    assert entries(monkeypatch, lambda: pa.softmax(q, k, v, attn_mask=own)) == 8 * 128 * 128
    packed = {"segment_ids": block[None] // 4, "prefix": [256]}
    assert entries(monkeypatch, lambda: pa.softmax(q, k, v, **packed)) == 2 * (1 + 10) * 128 * 128


def test_keys_between_a_prefix_and_a_window_are_not_computed(monkeypatch):
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1024, 1, 4))
    m = pa.Softmax(window=64)
    # Except the first two, each block of 128 rows has its own keys, 100 of the prefix, and 63
    # more of the window.
    expected = 128 * (128 + 256 + 6 * (100 + 63 + 128))
    calls = []

    def forward():
        calls.append(m.vjp(q, k, v, prefix=[100])[1])

    assert entries(monkeypatch, forward) == expected
    assert entries(monkeypatch, lambda: calls[0](np.ones((1, 1024, 1, 4)))) == expected
    packed = {"segment_ids": np.arange(1024)[None] // 512, "prefix": [100]}
    halves = 2 * 128 * (128 + 256 + 2 * (100 + 63 + 128))
    assert entries(monkeypatch, lambda: m(q, k, v, **packed)) == halves


def test_jax_loops_over_no_blocks_that_are_masked_as_a_whole():
    jnp = pytest.importorskip("jax.numpy")
    masks, layout = (pytest.importorskip(f"precondattn_jax.{n}") for n in ("masks", "layout"))
    position, blocks = jnp.arange(64)[None], layout.QueryBlocks(64, 64, 8)

    def count(*, window=None, **arrays):
        frame = Frame(position, position, **arrays)
        mask = masks.Mask(frame, blocks, window=window)
        ranges = [(int(i), int(j)) for a in blocks.rows for i, j in mask.ranges(a)]
        return sum(stop - first for first, stop in ranges) + 8 * mask.has_diagonal

    assert count() == 36
    assert count(q_prefix=jnp.full((1, 64), 16)) == 37
    # Two blocks of the window, and in later rows two of the prefix besides.
    assert count(q_prefix=jnp.full((1, 64), 16), window=8) == 2 + 2 + 3 + 5 * 4
    own = (position[0, :, None] // 8 == position[0] // 8)[None, None]
    assert count(pairs=own) == 8


@pytest.mark.parametrize("mask", ["prefix", "attn_mask"])
@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("lucid", "triangular solve relates keys to earlier keys, in causal order"),
        ("gated_delta", "sums up all tokens before a query in a state, without single pairs"),
        ("path", "scores depend on the tokens between the two of a pair"),
        ("nystrom", "does not relate tokens by scores of queries and keys alone"),
    ],
)
def test_other_mechanisms_refuse_masks_of_pairs_and_say_why(expression, why, mask):
    m = pa.parse(expression)
    x = make_inputs(m, CallLayout("test", b=1, t=4, s=4), "random")
    given = {"prefix": [1]} if mask == "prefix" else {"attn_mask": np.ones((1, 1, 4, 4), bool)}
    with pytest.raises(ValueError, match=f"takes no {mask}: .*{why}"):
        m(**x, **given)


def test_a_prefix_has_no_decay_and_no_cache_of_a_window(qkv):
    m = pa.Softmax(forget="scaled")
    with pytest.raises(ValueError, match="a forget gate decays forward in time"):
        m(*qkv, g=np.zeros((B, T, H)), prefix=PREFIX)
    m = pa.Softmax(window=9)
    with pytest.raises(ValueError, match="keeps the last tokens only, and no prefix"):
        m.extend(m.init_cache(*qkv, capacity=200), *qkv, prefix=PREFIX)
    with pytest.raises(ValueError, match="last tokens only, and not all columns of an attn_mask"):
        m.extend(m.init_cache(*qkv, capacity=200), *qkv, attn_mask=PAIRS)


@pytest.mark.parametrize(
    ("masks", "error", "match"),
    [
        ({"prefix": [1, -2]}, ValueError, r"prefix must not be negative \(sequence 1"),
        ({"prefix": [1]}, ValueError, r"prefix is declared \(b\), that is \(2,\); found \(1,\)"),
        ({"prefix": [1.5, 2]}, TypeError, "prefix must be whole numbers"),
        ({"attn_mask": np.ones((T, T), bool)}, ValueError, r"\(2 or 1, 4 or 1, 150, 150\); found"),
        ({"attn_mask": np.ones((1, 1, T, T))}, TypeError, "must have dtype bool; found float64"),
    ],
)
def test_bad_masks_of_pairs_are_named(masks, error, match, qkv):
    with pytest.raises(error, match=match):
        pa.softmax(*qkv, **masks)


def test_a_prefix_is_not_divided_between_two_extensions(qkv):
    m = pa.Softmax()
    first, last = ([a[:, part] for a in qkv] for part in (slice(0, 50), slice(50, None)))
    cache = m.init_cache(*qkv, capacity=T)
    message = r"within the new tokens of an empty cache, or within the cached ones \(sequence 1"
    with pytest.raises(ValueError, match=message):
        m.extend(cache, *first, prefix=PREFIX)
    cache = m.extend(cache, *first)[1]
    with pytest.raises(ValueError, match=message):
        m.extend(cache, *last, prefix=PREFIX)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("expression", ["softmax", "laser", "softmax[forget=scaled]"])
def test_an_extension_has_a_column_for_each_cached_and_new_token(expression, library, qkv):
    array, m = array_of(library), pa.parse(expression)
    x = dict(zip("qkv", qkv, strict=True))
    if "g" in m.inputs:
        x["g"] = -np.random.default_rng(5).random((B, T, H))
    x, pairs = {name: array(a) for name, a in x.items()}, array(PAIRS)
    expected = np.asarray(m(**x, attn_mask=pairs, backend=library))
    cache, outs = m.init_cache(**x, capacity=T + 7), []
    for start, stop in ((0, 40), (40, 41), (41, 120), (120, T)):
        new = {name: a[:, start:stop] for name, a in x.items()}
        mask = pairs[:, :, start:stop, :stop]
        out, cache = m.extend(cache, **new, attn_mask=mask, backend=library)
        outs.append(np.asarray(out))
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("library", LIBRARIES)
def test_sequences_of_different_lengths_have_columns_for_their_own_positions(library, qkv):
    array, m, lengths = array_of(library), pa.Softmax(), np.array([90, 30])
    q, k, v = map(array, qkv)
    cache = m.init_cache(q, k, v, capacity=T, key_mask=True)
    first = {"lengths": array(lengths), "key_mask": array(np.ones((B, 100), bool))}
    _, cache = m.extend(cache, *(a[:, :100] for a in (q, k, v)), **first, backend=library)
    pairs = array(PAIRS[:, :, 90:110, :110])
    new = [a[:, 100:120] for a in (q, k, v)]
    out, _ = m.extend(cache, *new, attn_mask=pairs, backend=library)
    whole = array(PAIRS[:, :, 90:110])
    same, _ = m.extend(cache, *new, attn_mask=whole, backend=library)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(same))
    for i, length in enumerate(lengths):
        at = [*range(length), *range(100, 120)]
        alone = PAIRS[i : i + 1, :, 90:110, : length + 20]
        expected = m(
            qkv[0][i : i + 1, 100:120], *(a[i : i + 1, at] for a in qkv[1:]), attn_mask=alone
        )
        np.testing.assert_allclose(np.asarray(out)[i : i + 1], expected, rtol=0, atol=1e-13)


def test_groups_of_heads_have_the_attn_mask_of_their_own(monkeypatch, qkv):
    monkeypatch.setattr(layout, "ROW_BLOCK_ENTRIES", 64)
    m, part = pa.Softmax(), slice(100, 110)
    expected = m(*qkv, attn_mask=PAIRS, backend="reference")[:, part]
    _, cache = m.extend(m.init_cache(*qkv, capacity=T), *(a[:, :100] for a in qkv))
    new = [a[:, part] for a in qkv]
    out, _ = m.extend(cache, *new, attn_mask=PAIRS[:, :, part, :110], backend="portable")
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)


def test_a_prefix_and_an_attn_mask_of_an_extension_go_together(qkv):
    m = pa.Softmax()
    expected = m(*qkv, prefix=PREFIX, attn_mask=PAIRS)
    cache, outs = m.init_cache(*qkv, capacity=T), []
    for start, stop in ((0, 110), (110, T)):
        given = {"prefix": PREFIX, "attn_mask": PAIRS[:, :, start:stop, :stop]}
        out, cache = m.extend(cache, *(a[:, start:stop] for a in qkv), **given)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, rtol=0, atol=1e-13)


def test_compiled_extensions_have_an_attn_mask_with_a_column_for_each_slot(qkv):
    jax = pytest.importorskip("jax")
    m, x = pa.Softmax(), [jax.numpy.asarray(a) for a in qkv]
    _, cache = m.extend(m.init_cache(*x, capacity=T), *(a[:, :100] for a in x))
    last = [a[:, 100:110] for a in x]
    step = jax.jit(lambda cache, mask: m.extend(cache, *last, attn_mask=mask)[0])
    pairs = jax.numpy.asarray(PAIRS[:, :, 100:110])
    expected = m.extend(cache, *last, attn_mask=pairs[..., :110])[0]
    np.testing.assert_allclose(step(cache, pairs), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(step(cache, pairs[..., :110]), expected, rtol=0, atol=1e-13)
    assert np.isnan(step(cache, pairs[..., :109])).all()
    for mask, match in ((pairs[..., :9], r"4 or 1, 10, 10 to 150\); found \(2, 4, 10, 9\)"),):
        with pytest.raises(ValueError, match=match):
            step(cache, mask)
    with pytest.raises(ValueError, match="a column for each cached and new token"):
        m.extend(cache, *last, attn_mask=pairs[..., :109])
    gradient = jax.grad(lambda q: m.extend(cache, q, *last[1:], attn_mask=pairs)[0].sum())(last[0])
    hidden = ~(PAIRS & CAUSAL)[:, :, 100:110].any(axis=3).swapaxes(1, 2)
    assert np.abs(gradient).max() > 0
    np.testing.assert_array_equal(np.asarray(gradient)[hidden], 0)


def test_torch_compiles_and_differentiates_an_extension_with_an_attn_mask(qkv):
    torch = pytest.importorskip("torch")
    m, x = pa.Softmax(), [torch.from_numpy(a) for a in qkv]
    _, cache = m.extend(m.init_cache(*x, capacity=T), *(a[:, :100] for a in x))
    last, pairs = [a[:, 100:110] for a in x], torch.from_numpy(PAIRS[:, :, 100:110, :110])

    def call(q):
        return m.extend(cache, q, *last[1:], attn_mask=pairs)[0]

    leaf, other = (last[0].clone().requires_grad_() for _ in "12")
    out, compiled = call(leaf), torch.compile(call, fullgraph=True, backend="eager")(other)
    torch.testing.assert_close(compiled, out)
    full = m(*(a[:, :110] for a in qkv), attn_mask=PAIRS[:, :, :110, :110])
    np.testing.assert_allclose(out.detach().numpy(), full[:, 100:], rtol=0, atol=1e-13)
    out.square().sum().backward()
    compiled.square().sum().backward()
    torch.testing.assert_close(other.grad, leaf.grad)
    q = qkv[0][:, :110].copy()
    pull = m.vjp(q, *(a[:, :110] for a in qkv[1:]), attn_mask=PAIRS[:, :, :110, :110])[1]
    expected = pull(np.concatenate([np.zeros_like(full[:, :100]), 2 * full[:, 100:]], axis=1))["q"]
    np.testing.assert_allclose(leaf.grad.numpy(), expected[:, 100:], rtol=0, atol=1e-12)


def test_packed_extensions_and_kept_states_have_no_prefix(qkv):
    m, (q, k, v) = pa.Softmax(), (a[:1] for a in qkv)
    cache = m.init_cache(q, k, v, capacity=T, sequences=2)
    linear = pa.Linear()
    sums_up = "sums up all tokens before a query in a state"
    for name, mask in (("prefix", PREFIX), ("attn_mask", PAIRS)):
        with pytest.raises(ValueError, match=f"packed sequences of extend take no {name}"):
            m.extend(cache, q, k, v, cu_seqlens=[0, 50, T], **{name: mask})
        with pytest.raises(ValueError, match=f"takes no {name}: linear {sums_up}"):
            linear.extend(linear.init_cache(*qkv), *qkv, keep=2, **{name: mask})
        with pytest.raises(TypeError, match=f"a state sums up all tokens, and has no {name}"):
            linear.extend_vjp(linear.init_cache(*qkv), *qkv, **{name: mask})


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_what_distances_add_goes_with_them(library, qkv):
    m, array = pa.Softmax(distance="slopes"), array_of(library)
    named = {"slopes": np.array([0.5, 0.25, 0.1, 0.01])}
    masks = {"prefix": PREFIX, "attn_mask": PAIRS}
    expected, pull = m.vjp(*qkv, **named, **masks, backend="reference")
    out, pullback = m.vjp(
        *map(array, qkv),
        slopes=array(named["slopes"]),
        **{n: array(a) for n, a in masks.items()},
        backend=library,
    )
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
    found = pullback(array(np.ones(expected.shape)))
    for name, gradient in pull(np.ones(expected.shape)).items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-10, atol=1e-11)


def test_a_backend_that_does_not_know_them_is_not_asked(qkv):
    class Blind(pa.Backend):
        name, libraries, preference = "blind", frozenset({"numpy"}), 99

        def prepare(self, piece, request):
            raise AssertionError

    m = pa.Softmax()
    request = m.explain(*qkv, prefix=PREFIX).request
    answer = query(Blind(), m, request)
    assert answer == "has no masks of pairs: prefix"


def test_nan_in_a_prefix_of_a_segment_reaches_that_segment_and_no_other(qkv):
    q, k, v = (a.copy() for a in qkv)
    k[0, 55] = np.nan  # The token is in the prefix of the second segment.
    out = pa.softmax(q, k, v, prefix=PREFIX, segment_ids=SEGMENTS)
    is_nan = np.isnan(out).all(axis=(2, 3))
    np.testing.assert_array_equal(is_nan[0], AT // 50 == 1)
    assert not is_nan[1].any()
    clean = pa.softmax(*qkv, prefix=PREFIX, segment_ids=SEGMENTS)
    np.testing.assert_array_equal(out[~is_nan], clean[~is_nan])
    k[0, 55], k[0, 60] = 0, np.nan  # After the prefix: it reaches later tokens only.
    out = pa.softmax(q, k, v, prefix=PREFIX, segment_ids=SEGMENTS)
    np.testing.assert_array_equal(np.isnan(out[0]).all(axis=(1, 2)), (AT // 50 == 1) & (AT >= 60))


def test_compiled_mapped_and_recorded_calls_have_the_masks(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv)
    pairs, prefix = torch.from_numpy(PAIRS), torch.from_numpy(PREFIX)

    def call(q, pairs):
        return pa.softmax(q, k, v, attn_mask=pairs, prefix=prefix)

    expected = torch.from_numpy(dense(*qkv, (CAUSAL | FIRST) & PAIRS))
    two = torch.vmap(call)(torch.stack([q, q]), torch.stack([pairs, pairs]))
    torch.testing.assert_close(two, torch.stack([expected, expected]))
    leaf = q.clone().requires_grad_()
    torch.compile(call, fullgraph=True, backend="eager")(leaf, pairs).square().sum().backward()
    pull = pa.Softmax().vjp(*qkv, attn_mask=PAIRS, prefix=PREFIX)[1]
    expected_gradient = pull(2 * expected.numpy())["q"]
    np.testing.assert_allclose(leaf.grad.numpy(), expected_gradient, rtol=0, atol=1e-12)

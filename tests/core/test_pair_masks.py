"""Masks of pairs, `attn_mask` and `prefix`: alone, and beside causality and all other masks.

The conformance suite compares backends under them with the reference, also for what is around
softmax. Here softmax attention is written out, and blocks and transformations are tested.
"""

import math
from functools import partial

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import Frame
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
PAIRS = np.random.default_rng(1).random((B, H, T, T)) > 0.4
"""With rows that see nothing, and with keys and tiles that no query may attend to."""
PAIRS[0, 1, 5] = PAIRS[:, :, :, 20:40] = PAIRS[:, :, 128:, :70] = PAIRS[1, 0, 90:] = False
QKV = [np.random.default_rng(0).normal(size=(B, T, heads, D)) for heads in (H, N, N)]
LIBRARIES = {"torch": "torch", "jax": "jax.numpy"}
OF_SEGMENTS = {"prefix": PREFIX, "segment_ids": SEGMENTS}
CALLS = {
    "attn_mask": ("softmax", {"attn_mask": PAIRS}, CAUSAL & PAIRS),
    "one for all": ("softmax", {"attn_mask": PAIRS[:1, :1]}, CAUSAL & PAIRS[:1, :1]),
    "not causal": ("softmax[causal=false]", {"attn_mask": PAIRS}, PAIRS),
    "window": ("softmax[window=9]", {"prefix": PREFIX}, (CAUSAL & NEAR) | FIRST),
    "segments": ("softmax[window=9]", OF_SEGMENTS, ((CAUSAL & NEAR) | FIRST_OF_SEGMENT) & SAME),
    "all": (
        "softmax",
        OF_SEGMENTS | {"attn_mask": PAIRS},
        (CAUSAL | FIRST_OF_SEGMENT) & SAME & PAIRS,
    ),
}


def array_of(backend):
    return pytest.importorskip(LIBRARIES.get(backend, "numpy")).asarray


def close(found, expected, atol=1e-12):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=atol)


def dense(q, k, v, visible):
    """Softmax attention over the visible pairs, written out; 0 where a query sees nothing."""
    k, v = (np.repeat(a, H // N, axis=2) for a in (k, v))
    scores = np.where(visible, np.einsum("bihd,bjhd->bhij", q, k) * D**-0.5, -np.inf)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True, initial=-100))
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", weights / np.where(total > 0, total, 1), v)


def agree(m, x, masks, backend):
    """Output and gradients are those of the reference in NumPy; returns them."""
    array = array_of(backend)
    arrays, given = ({n: array(a) for n, a in each.items()} for each in (x, masks))
    out, pullback = m.vjp(**arrays, **given, backend=backend)
    expected, definition = m.vjp(**x, **masks, backend="reference")
    close(out, expected)
    cotangent = np.random.default_rng(2).normal(size=expected.shape)
    gradients = pullback(array(cotangent))
    for name, gradient in definition(cotangent).items():
        close(gradients[name], gradient, 1e-11)
    return np.asarray(out), {name: np.asarray(d) for name, d in gradients.items()}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "reference") for name in CALLS),
        *(("one for all", "portable"), ("not causal", "torch"), ("window", "portable")),
        *(("segments", "torch"), ("all", "portable"), ("all", "torch"), ("all", "jax")),
    ],
)
def test_a_query_sees_what_all_masks_together_let_it_see(name, backend):
    text, masks, visible = CALLS[name]
    x = dict(zip("qkv", QKV, strict=True))
    out, gradients = agree(pa.parse(text), x, masks, backend)
    close(out, dense(*QKV, visible), 1e-13)
    is_blind = ~np.broadcast_to(visible.any(axis=3), (B, H, T)).swapaxes(1, 2)
    assert is_blind.any() == (name in ("attn_mask", "not causal", "all"))
    assert not out[is_blind].any()
    assert not gradients["q"][is_blind].any()


@pytest.mark.parametrize(
    ("text", "masks", "backend"),
    [
        ("softmax[window=9]", ("segment_ids",), "torch"),
        ("softmax[window=9]", ("lengths", "attn_mask"), "portable"),
        ("softmax[window=9,causal=false]", ("key_mask",), "portable"),
        ("softmax[window=9,bias=true,sink=true]", ("segment_ids",), "jax"),
        ("laser(softmax[window=9])", ("lengths",), "torch"),
    ],
)
def test_a_window_far_from_its_prefix(text, masks, backend):
    m, rng = pa.parse(text), np.random.default_rng(4)
    at, s = np.arange(600), 600
    t = s if "segment_ids" in masks else 570
    every = {
        "segment_ids": np.stack([at // 400, (at >= 100) + 0]),
        "lengths": np.array([600, 511]),
        "key_mask": np.stack([at % 7 != 0, at % 500 > 3]),
        "attn_mask": (at % 6 != at[:t, None] % 6)[None, None],
    }
    sizes = {"b": 2, "t": t, "s": s, "h": 2, "n": 1, "d": 4, "e": 4}
    x = {name: rng.normal(size=pattern.shape(sizes)) for name, pattern in m.inputs.items()}
    agree(m, x, {"prefix": np.array([5, 40]), **{n: every[n] for n in masks}}, backend)


def test_padding_packed_sequences_fewer_queries_and_nan():
    q, k, v = QKV
    out = pa.softmax(q, k, v, prefix=PREFIX, lengths=np.array([150, 60]))
    close(out[1:, :60], pa.Softmax(causal=False)(*(a[1:, :60] for a in QKV)), 1e-13)
    assert not out[1, 60:].any()
    packed = pa.softmax(*(a[:1] for a in QKV), cu_seqlens=[0, 50, 140], prefix=[10, 20])
    for start, stop, prefix in ((0, 50, 10), (50, 140, 20)):
        alone = pa.softmax(*(a[:1, start:stop] for a in QKV), prefix=[prefix])
        close(packed[:, start:stop], alone, 1e-13)
    assert not packed[:, 140:].any()
    last = pa.softmax(q[:, 140:], k, v, **OF_SEGMENTS, attn_mask=PAIRS[:, :, 140:])
    close(last, pa.softmax(q, k, v, **OF_SEGMENTS, attn_mask=PAIRS)[:, 140:], 1e-13)
    clean = pa.softmax(*QKV, **OF_SEGMENTS)
    for token, reached in ((55, AT // 50 == 1), (60, (AT // 50 == 1) & (AT >= 60))):
        bad = k.copy()
        bad[0, token] = np.nan  # The first is in the prefix of the second segment, the other not.
        out = pa.softmax(q, bad, v, **OF_SEGMENTS)
        is_nan = np.isnan(out).all(axis=(2, 3))
        np.testing.assert_array_equal(is_nan, [reached, np.zeros(T)])
        np.testing.assert_array_equal(out[~is_nan], clean[~is_nan])


@pytest.mark.parametrize(
    ("name", "backend"), [("prefix", "reference"), ("prefix", "torch"), ("attn_mask", "portable")]
)
def test_prefill_and_decoding_agree_with_the_full_call(name, backend):
    """Later tokens see the prefix, whether it is given again or not."""
    array, m, mask = array_of(backend), pa.Softmax(), {"prefix": PREFIX, "attn_mask": PAIRS}[name]
    expected = m(*QKV, **{name: mask}, backend="reference")
    x, mask = [array(a) for a in QKV], array(mask)
    cache, outs = m.init_cache(*x, capacity=T + 7), []
    for start, stop in ((0, 110), (110, 111), (111, T)):
        rows = {"prefix": mask} if start != 110 else {}
        given = rows if name == "prefix" else {name: mask[:, :, start:stop, :stop]}
        out, cache = m.extend(cache, *(a[:, start:stop] for a in x), **given, backend=backend)
        outs.append(np.asarray(out))
    close(np.concatenate(outs, axis=1), expected, 1e-13)


def test_blocks_that_are_masked_as_a_whole_are_not_computed(monkeypatch):
    sizes, row_block = [], HeadGroup.row_block

    def counted(group, tile):
        scores = row_block(group, tile)
        sizes.append(math.prod(scores.shape))
        return scores

    def entries(call, *arguments, **named):
        """The number of scores in the row blocks of a call, and its result."""
        sizes.clear()
        result = call(*arguments, **named)
        return sum(sizes), result

    monkeypatch.setattr(HeadGroup, "row_block", counted)
    qkv = np.random.default_rng(0).normal(size=(3, 1, 1024, 1, 4))
    block = np.arange(1024) // 128
    own = (block[:, None] == block)[None, None]
    causal, _ = entries(pa.softmax, *qkv)
    of_block = 128 * 128
    for masks, expected in (
        # Two blocks of 128 rows see 256 keys, and not 128 and 256: one block more.
        ({"prefix": [256]}, causal + of_block),
        ({"attn_mask": own}, 8 * of_block),
        ({"segment_ids": block[None] // 4, "prefix": [256]}, 2 * (1 + 10) * of_block),
    ):
        assert entries(pa.softmax, *qkv, **masks)[0] == expected
    # Except the first two, each block of 128 rows has its own keys, 100 of the prefix, and 63
    # more of the window.
    m, expected = pa.Softmax(window=64), 128 * (128 + 256 + 6 * (100 + 63 + 128))
    forward, (out, pullback) = entries(m.vjp, *qkv, prefix=[100])
    assert forward == entries(pullback, out)[0] == expected
    halves = 2 * 128 * (128 + 256 + 2 * (100 + 63 + 128))
    assert entries(m, *qkv, segment_ids=block[None] // 4, prefix=[100])[0] == halves


def test_jax_loops_over_no_blocks_that_are_masked_as_a_whole():
    jnp = pytest.importorskip("jax.numpy")
    masks, blocks = (pytest.importorskip(f"precondattn_jax.{n}") for n in ("masks", "layout"))
    position, rows = jnp.arange(64)[None], blocks.QueryBlocks(64, 64, 8)

    def count(*, window=None, **arrays):
        mask = masks.Mask(Frame(position, position, **arrays), rows, window=window)
        ranges = [(int(i), int(j)) for a in rows.rows for i, j in mask.ranges(a)]
        return sum(stop - first for first, stop in ranges) + 8 * mask.has_diagonal

    prefix = jnp.full((1, 64), 16)
    assert count() == 36
    assert count(q_prefix=prefix) == 37
    # Two blocks of the window, and in later rows two of the prefix besides.
    assert count(q_prefix=prefix, window=8) == 2 + 2 + 3 + 5 * 4
    assert count(pairs=(position[0, :, None] // 8 == position[0] // 8)[None, None]) == 8


def extension(array):
    """A cache of 100 tokens, the next ten, and their rows of the mask."""
    m, x = pa.Softmax(), [array(a) for a in QKV]
    _, cache = m.extend(m.init_cache(*x, capacity=T), *(a[:, :100] for a in x))
    return m, cache, [a[:, 100:110] for a in x], array(PAIRS[:, :, 100:110])


def test_jax_compiles_an_extension_with_a_column_for_each_slot():
    jax = pytest.importorskip("jax")
    m, cache, last, pairs = extension(jax.numpy.asarray)
    step = jax.jit(lambda cache, mask: m.extend(cache, *last, attn_mask=mask)[0])
    expected = m.extend(cache, *last, attn_mask=pairs[..., :110])[0]
    close(step(cache, pairs), expected, 1e-13)
    close(step(cache, pairs[..., :110]), expected, 1e-13)
    assert np.isnan(step(cache, pairs[..., :109])).all()
    with pytest.raises(ValueError, match=r"4 or 1, 10, 10 to 150\); found \(2, 4, 10, 9\)"):
        step(cache, pairs[..., :9])
    with pytest.raises(ValueError, match="a column for each cached and new token"):
        m.extend(cache, *last, attn_mask=pairs[..., :109])


def test_pytorch_compiles_maps_and_differentiates_calls_and_extensions():
    torch = pytest.importorskip("torch")
    m, cache, last, rows = extension(torch.from_numpy)
    q, k, v = map(torch.from_numpy, QKV)
    pairs, prefix = torch.from_numpy(PAIRS), torch.from_numpy(PREFIX)
    out, pull = m.vjp(*(a[:, :110] for a in QKV), attn_mask=PAIRS[:, :, :110, :110])
    d = 2 * np.where(np.arange(110)[:, None, None] < 100, 0, out)
    of_step = out[:, 100:], pull(d)["q"][:, 100:]
    whole = dense(*QKV, (CAUSAL | FIRST) & PAIRS)
    pull = m.vjp(*QKV, attn_mask=PAIRS, prefix=PREFIX)[1]
    of_call = whole, pull(2 * whole)["q"]

    def step(q):
        return m.extend(cache, q, *last[1:], attn_mask=rows[..., :110])[0]

    def call(q, pairs=pairs):
        return m(q, k, v, attn_mask=pairs, prefix=prefix)

    compiled = partial(torch.compile, fullgraph=True, backend="eager")
    for function, q_of, (expected, gradient) in (
        (compiled(step), last[0], of_step),
        (compiled(call), q, of_call),
    ):
        leaf = q_of.clone().requires_grad_()
        result = function(leaf)
        result.square().sum().backward()
        close(result.detach(), expected, 1e-13)
        close(leaf.grad, gradient)
    two = torch.vmap(call)(torch.stack([q, q]), torch.stack([pairs, pairs]))
    close(two, [whole, whole], 1e-13)

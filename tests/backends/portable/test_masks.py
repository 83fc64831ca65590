"""Row blocks need the keys of their own segments only, and are masked where pairs differ."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_portable.arithmetic import IN_PLACE
from precondattn_portable.layout import Tile
from precondattn_portable.masks import Mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 11, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("t", "size"), [(24, 4), (24, 5), (7, 4), (1, 1)])
def test_row_blocks_are_masked_as_the_definition_says(t, size, strict, causal, window, masked):
    """Blocks whose pairs are at equal distances share a mask, whatever their order."""
    s = 24
    key_mask = np.random.default_rng(0).uniform(size=(1, s)) < 0.7 if masked else None
    frame = full_frame(t, s, np.zeros(1), key_mask=key_mask)
    mask = Mask(frame, s, s - t, causal, window, strict)
    whole = frame.visible(causal=causal, window=window, strict=strict)[0, 0]
    for i0 in [*range(0, t, size), *range(0, t, size)]:
        i1 = min(i0 + size, t)
        low, high = mask.columns(i0, i1)
        row_block = np.ones((1, 1, i1 - i0, high - low))
        found = mask.apply(IN_PLACE, row_block, Tile(i0, i1, low, high), 0.0)
        np.testing.assert_array_equal(found[0, 0] == 1.0, whole[i0:i1, low:high])
        assert not whole[i0:i1, :low].any()
        assert not whole[i0:i1, high:].any()


def test_a_packed_call_with_a_bias_computes_no_blocks_of_other_segments(monkeypatch):
    # A bias relates pairs of tokens, so that the segments can not be moved into a batch.
    # Row blocks have up to 256 rows.
    s, length, widths, columns = 768, 128, [], Mask.columns

    def noted(mask, i0, i1):
        low, high = columns(mask, i0, i1)
        widths.append(high - low)
        return low, high

    monkeypatch.setattr(Mask, "columns", noted)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, s, 1, 4))
    ids = np.arange(s)[None] // length
    m, bias = pa.parse("lucid(softmax[bias=true])"), np.zeros((1, 1, s, s))
    _, pullback = m.vjp(q, k, v, bias=bias, segment_ids=ids, backend="portable")
    pullback(v)
    assert 0 < max(widths) <= 2 * length

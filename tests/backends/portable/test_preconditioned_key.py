"""ATK's key in chunks against its definition, with tokens that are no whole chunk."""

import math

import numpy as np
import pytest

import precondattn as pa
from precondattn_portable.preconditioned_key import KEY_CHUNK


def inputs(s, b=2, h=3, d=5, seed=0):
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(b, s, h, d)) + 2  # Clustered.
    k[:, s // 2] = 0
    k = k / np.maximum(np.linalg.vector_norm(k, axis=-1, keepdims=True), 1e-9)
    g = -(rng.normal(size=(b, s, h)) ** 2)
    return {"k": k, "g_atk": g, "beta_atk": rng.uniform(size=(b, s, h))}


@pytest.mark.parametrize("s", [1, KEY_CHUNK - 1, KEY_CHUNK, KEY_CHUNK + 1, 5 * KEY_CHUNK + 3])
@pytest.mark.parametrize("masks", ["none", "lengths", "key_mask", "segments"])
@pytest.mark.parametrize("learned", [False, True])
def test_it_is_the_definition(s, masks, learned):
    x, rng = inputs(s), np.random.default_rng(1)
    if learned:
        x["log_atk_scale"] = rng.normal(size=3)
    x["g_atk"][:, s // 3] = -math.inf
    x["g_atk"][0, s // 2] = -50.0
    given = {
        "none": {},
        "lengths": {"lengths": np.asarray([s, s // 2])},
        "key_mask": {"key_mask": rng.uniform(size=(2, s)) < 0.7},
        "segments": {"segment_ids": np.sort(rng.integers(3, size=(2, s)), axis=1)},
    }[masks]
    key = pa.PreconditionedKey(learned=learned)
    found = key(**x, **given, backend="portable")
    expected = key(**x, **given, backend="reference")
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_chunks_in_several_groups(monkeypatch):
    monkeypatch.setattr(
        "precondattn_portable.preconditioned_key.TOGETHER", 2 * 3 * 5 * KEY_CHUNK * 2
    )
    x = inputs(9 * KEY_CHUNK + 5)
    found = pa.PreconditionedKey()(**x, backend="portable")
    expected = pa.PreconditionedKey()(**x, backend="reference")
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)

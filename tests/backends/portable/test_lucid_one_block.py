"""LUCID's system of few tokens is solved in one block, and equals the definition."""

import array_api_strict
import numpy as np
import pytest
import torch

import precondattn as pa
from precondattn_portable import lucid_solve
from precondattn_portable.layout import ROWS

LIBRARIES = {
    "numpy": np.asarray,
    "array_api_strict": array_api_strict.asarray,
    "torch": torch.as_tensor,
}
LEAVES = ("lucid_solve", "lucid_solve[beta=true]", "lucid_solve[window=3]")
MASKS = {
    "none": {},
    "lengths": {"lengths": [9, 4]},
    "key_mask": {"key_mask": np.arange(18).reshape(2, 9) % 4 != 1},
    "segments": {"segment_ids": np.asarray([[0] * 4 + [1] * 5, [3] * 9], dtype=np.int32)},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("expression", LEAVES)
def test_few_tokens_are_solved_in_one_block(expression, library, masks, monkeypatch):
    def refuse(*_):
        raise AssertionError("few tokens were divided into blocks")

    monkeypatch.setattr(lucid_solve.LucidSolveBlocks, "_view", refuse)
    rng = np.random.default_rng(0)
    leaf, of_library = pa.parse(expression), LIBRARIES[library]
    x = {"k": rng.normal(size=(2, 9, 3, 4)), "v": rng.normal(size=(2, 9, 3, 5))}
    if "lucid_beta" in leaf.inputs:
        x["lucid_beta"] = rng.uniform(0, 2, size=(2, 9, 3))
    expected = leaf(**x, **MASKS[masks], backend="reference")
    given = {
        name: of_library(m) if isinstance(m, np.ndarray) else m for name, m in MASKS[masks].items()
    }
    out = leaf(**{name: of_library(a) for name, a in x.items()}, **given)
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-11, atol=1e-11)


def test_more_tokens_than_a_block_are_divided():
    k = np.random.default_rng(0).normal(size=(1, ROWS + 1, 1, 2))
    assert not lucid_solve.is_one_block({"k": k})
    assert lucid_solve.is_one_block({"k": k[:, 1:]})

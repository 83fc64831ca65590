"""No call modifies its inputs, masks or cache, even when it raises an error."""

from functools import partial

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.core.bad_input import refuses


class Given:
    """All arguments of a call in one library, with NaN at masked positions."""

    def __init__(self, library, mechanism):
        rng = np.random.default_rng(1)
        q, k, v, g = rng.normal(size=(4, 2, 4, 2, 3))
        for array in (q, k, v):
            array[0, 3:] = np.nan
        layout = CallLayout("given", t=4, s=4, h=2, n=2, d=3, e=3)
        extra = make_inputs(mechanism, layout, "random")
        convert = pytest.importorskip(library).asarray
        self.mechanism = mechanism
        self.named = {"q": convert(q), "k": convert(k), "v": convert(v)}
        self.named = {n: convert(a) for n, a in extra.items()} | self.named
        self.cotangent = convert(g)
        self.lengths = convert(np.asarray([3, 4]))
        self.beyond = convert(np.asarray([3, 5]))
        self.key_mask = convert(rng.uniform(size=(2, 4)) < 0.7)
        self.short_mask = self.key_mask[:, :3]
        self.segment_ids = convert(np.asarray([[0, 0, 1, 1], [5, 5, 5, 2]]))
        self.torn_ids = convert(np.asarray([[0, 1, 0, 1], [0, 0, 0, 0]]))
        self.cache = self.full = None
        if mechanism.offers.causal:
            cache = mechanism.init_cache(**self.named, capacity=8, key_mask=True)
            wide = convert(rng.normal(size=(2, 2, 4, 8)))
            self.new = self.named | ({"bias": wide} if "bias" in self.named else {})
            first = {"lengths": self.lengths, "key_mask": self.key_mask}
            _, self.cache = mechanism.extend(cache, **self.new, **first)
            _, self.full = mechanism.extend(self.cache, **self.new)

    def snapshot(self):
        """Copies of all arrays."""
        result = {}

        def visit(path, value):
            if isinstance(value, dict):
                for name, item in value.items():
                    visit((*path, name), item)
            elif isinstance(value, pa.Cache):
                visit((*path, "length"), value.length)
                visit((*path, "store"), value.store)
            elif hasattr(value, "shape"):
                result[path] = np.asarray(value).copy()

        visit((), vars(self))
        return result


ACTS = {
    "call": lambda x: x.mechanism(**x.named),
    "call with lengths": lambda x: x.mechanism(**x.named, lengths=x.lengths),
    "call with every mask": lambda x: x.mechanism(
        **x.named, lengths=x.lengths, key_mask=x.key_mask, segment_ids=x.segment_ids
    ),
    "pullback": lambda x: x.mechanism.vjp(**x.named, lengths=x.lengths, key_mask=x.key_mask)[1](
        x.cotangent
    ),
    "explain": lambda x: x.mechanism.explain(**x.named, lengths=x.lengths),
}


CACHE_ACTS = {
    "init_cache": lambda x: x.mechanism.init_cache(**x.named, capacity=8),
    "extend": lambda x: x.mechanism.extend(x.cache, **x.new),
    "extend with masks": lambda x: x.mechanism.extend(
        x.cache, **x.new, lengths=x.lengths, key_mask=x.key_mask
    ),
    "explain extend": lambda x: x.mechanism.explain(**x.new, cache=x.cache),
}


BAD_ACTS = {
    "unknown keyword": lambda x: x.mechanism(**x.named, length=x.lengths),
    "unknown backend": lambda x: x.mechanism(**x.named, backend="tritn", lengths=x.lengths),
    "lengths beyond": lambda x: x.mechanism(**x.named, lengths=x.beyond, key_mask=x.key_mask),
    "short mask": lambda x: x.mechanism(**x.named, lengths=x.lengths, key_mask=x.short_mask),
    "torn segments": lambda x: x.mechanism(**x.named, lengths=x.lengths, segment_ids=x.torn_ids),
    "conflicting width": lambda x: x.mechanism(**(x.named | {"k": x.named["k"][..., :2]})),
    "cotangent of another shape": lambda x: x.mechanism.vjp(**x.named, lengths=x.lengths)[1](
        x.cotangent[:1]
    ),
}


BAD_CACHE_ACTS = {
    f"{name}{', donated' if donate else ''}": partial(act, donate=donate)
    for donate in (False, True)
    for name, act in {
        "capacity exceeded": lambda x, donate: x.mechanism.extend(x.full, **x.new, donate=donate),
        "new lengths beyond": lambda x, donate: x.mechanism.extend(
            x.cache, **x.new, lengths=x.beyond, donate=donate
        ),
        "short new mask": lambda x, donate: x.mechanism.extend(
            x.cache, **x.new, key_mask=x.short_mask, donate=donate
        ),
        "unknown backend for extend": lambda x, donate: x.mechanism.extend(
            x.cache, **x.new, backend="tritn", donate=donate
        ),
    }.items()
}


WORDS = {
    "unknown keyword": "unknown keyword 'length'",
    "unknown backend": "unknown backend 'tritn'",
    "lengths beyond": "lengths must lie between 0 and s = 4",
    "short mask": "key_mask is declared",
    "torn segments": "segment_ids must be contiguous",
    "conflicting width": "k is declared",
    "cotangent of another shape": "the cotangent must have the output's shape",
    "capacity exceeded": "capacity exceeded",
    "new lengths beyond": "lengths must lie between 0 and t = 4",
    "short new mask": "key_mask is declared",
    "unknown backend for extend": "unknown backend 'tritn'",
}


FREE_TEXT = "softmax[causal=false]"


CAUSAL_TEXTS = [
    "softmax",
    "softmax[bias=true]",
    "lucid",
    "lucid[beta=true]",
    "lucid[normalize=queries_and_keys]",
    "lucid[normalize=rows]",
    "laser",
    "lucid(laser)",
    "lucid(path[flush=3])",
    "path[forget=scaled]",
    "differential[per=token]",
    "row_normalized(qk_norm[gain=true])",
]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("text", [*CAUSAL_TEXTS, FREE_TEXT])
def test_no_input_mask_or_cache_is_modified_even_when_an_error_is_raised(text, library):
    given = Given(library, pa.parse(text))
    before = given.snapshot()
    acts = ACTS | BAD_ACTS
    if given.cache is not None:
        acts |= CACHE_ACTS | BAD_CACHE_ACTS
    for act, run in acts.items():
        words = WORDS.get(act.removesuffix(", donated"))
        if words is None:
            run(given)
        else:
            refuses(lambda run=run: run(given), (TypeError, ValueError), words)
        after = given.snapshot()
        assert after.keys() == before.keys(), act
        for path, array in before.items():
            message = f"{path} after {act}"
            np.testing.assert_array_equal(after[path], array, err_msg=message, strict=True)

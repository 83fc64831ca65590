"""A refusal that says what to do instead is right: what it advises works."""

import itertools
import re
from typing import NamedTuple

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from tests.core.test_cupy_stand_in import make_inputs
from tests.core.test_shared_memory import arrays_of

# ---------------------------------------------------------------------------- compositions

OURS = [m for m in registry.registered().values() if m.__module__.startswith("precondattn.")]
OUTER, BASES = (
    [mechanism.name for mechanism in OURS if mechanism.role == role]
    for role in ("preconditioner", "base")
)


def refusal_of(text):
    try:
        pa.parse(text)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def names_in(mechanism):
    inner = getattr(mechanism, "base", None)
    return {mechanism.name} | (set() if inner is None else names_in(inner))


def test_a_composition_that_a_refusal_advises_can_be_written_and_has_the_same_names():
    advised = 0
    for outer, inner, base in itertools.product(OUTER, ("", *OUTER), BASES):
        of_base = f"{inner}({base})" if inner else base
        message = f"{outer}({of_base})" if refusal_of(of_base) is None else None
        message = message and refusal_of(message)
        if message is None or "; write " not in message:
            continue
        advice = message.rpartition("; write ")[2]
        assert refusal_of(advice) is None, message
        given = {outer, inner, base} - {""}
        if outer == "ccq":  # It normalises by itself.
            given -= {"qk_norm"}
        assert names_in(pa.parse(advice)) == given, message
        advised += 1
    assert advised > 200


@pytest.mark.parametrize("text", ["gated_delta", "softmax", "linear"])
def test_what_ccq_advises_for_a_norm_of_queries_and_keys_normalises_both(text):
    message = refusal_of(f"ccq(qk_norm[norm=l2,eps=0]({text}))")
    advised = pa.parse(message.rpartition("; write ")[2])
    arrays = make_inputs(advised)
    longer = {**arrays, "q": 3 * arrays["q"], "k": 5 * arrays["k"]}
    np.testing.assert_allclose(advised(**longer), advised(**arrays), rtol=1e-4, atol=1e-6)


def test_advice_is_found_at_once_for_the_deepest_mechanism():
    text = "laser(" * 98 + "qk_norm" + ")" * 98
    assert refusal_of(f"temperature({text})") is not None


# ----------------------------------------------------------------------------------- calls


class Advice(NamedTuple):
    """A refused call, what its message advises, and the call that does that."""

    says: str
    refused: object
    advised: object


class Made:
    """Mechanisms and arrays of the calls below."""

    def __init__(self):
        self.free, self.lucid, self.linear = pa.Softmax(causal=False), pa.Lucid(), pa.Linear()
        self.x = make_inputs(self.free)
        self.few = {**self.x, "q": self.x["q"][:, :3]}
        self.one = {name: array[:1] for name, array in self.x.items()}
        self.ids = np.asarray([[0, 0, 1, 1, 1]] * 2)

    def cache(self, mechanism, **options):
        return mechanism.extend(mechanism.init_cache(**self.x, **options), **self.x)[1]

    def differentiated(self):
        torch = pytest.importorskip("torch")
        x = {n: a.requires_grad_() for n, a in arrays_of("torch", self.x).items()}
        return torch, x, self.lucid.init_cache(**x, capacity=9)


def extended_without_gradient(m):
    torch, x, cache = m.differentiated()
    m.lucid.extend(cache, **x)
    with torch.no_grad():
        m.lucid.extend(cache, **x, donate=True)


def cropped_without_gradient(m):
    torch, x, cache = m.differentiated()
    _, cache = m.lucid.extend(cache, **x)
    cache.crop(2)
    with torch.no_grad():
        cache.crop(2, donate=True)


def crops_with_gradient(m):
    _, x, cache = m.differentiated()
    m.lucid.extend(cache, **x)[1].crop(2, donate=True)


def restored(m, mechanism, **options):
    cache = mechanism.init_cache(**m.x, **options)
    snapshot = cache.snapshot()
    mechanism.extend(cache, **m.x)[1].restore(snapshot)


def pulled_before(m, act):
    torch = pytest.importorskip("torch")
    x = arrays_of("torch", m.x)
    out, pullback = m.lucid.vjp(**x)
    act(torch, x, lambda: pullback(out))


WINDOW = pa.Softmax(window=3)
GRID = pa.Windowed(size=(1, 5), grid=(1, 5))
START = {"landmarks": 2, "start": "batch"}

ADVICE = [
    Advice(
        "use key_mask",
        lambda m: m.free(**m.few, lengths=[5, 4]),
        lambda m: m.free(**m.few, key_mask=np.arange(5) < np.asarray([[5], [4]])),
    ),
    Advice(
        "(use segment_ids)",
        lambda m: m.lucid(**m.x, cu_seqlens=[0, 2, 5]),
        lambda m: m.lucid(**m.x, segment_ids=m.ids),
    ),
    Advice(
        "call it under torch.no_grad(), or without donate",
        lambda m: m.lucid.extend(m.differentiated()[2], **m.differentiated()[1], donate=True),
        extended_without_gradient,
    ),
    Advice(
        "call it under torch.no_grad(), or without donate",
        crops_with_gradient,
        cropped_without_gradient,
    ),
    Advice(
        "create it with init_cache(..., key_mask=True)",
        lambda m: m.lucid.extend(m.lucid.init_cache(**m.x, capacity=5), **m.x, key_mask=m.ids == 1),
        lambda m: m.lucid.extend(
            m.lucid.init_cache(**m.x, capacity=5, key_mask=True), **m.x, key_mask=m.ids == 1
        ),
    ),
    Advice(
        "use vjp of a full call",
        lambda m: m.lucid.extend_vjp(m.lucid.init_cache(**m.x, capacity=5), **m.x),
        lambda m: m.lucid.vjp(**m.x),
    ),
    Advice(
        "pass v too",
        lambda m: m.lucid.init_cache(m.x["q"], m.x["k"], capacity=5),
        lambda m: m.lucid.init_cache(m.x["q"], m.x["k"], v=m.x["v"], capacity=5),
    ),
    Advice(
        "take a snapshot() before the tokens, and restore() it",
        lambda m: m.cache(m.linear).crop(2),
        lambda m: restored(m, m.linear),
    ),
    Advice(
        "take a snapshot() before the tokens, and restore() it",
        lambda m: m.cache(WINDOW, capacity=90).crop(1),
        lambda m: restored(m, WINDOW, capacity=90),
    ),
    Advice(
        "reorder() repeats sequences",
        lambda m: m.cache(m.linear).select([1, 1]),
        lambda m: m.cache(m.linear).reorder([1, 1]),
    ),
    Advice(
        "replace buffers by `cache._replace(store=...)`",
        lambda m: pa.Cache(m.cache(m.linear).length, m.cache(m.linear).store).select([0]),
        lambda m: m.cache(m.linear)._replace(store=m.cache(m.linear).store).select([0]),
    ),
    Advice(
        'start="matrix" is expected',
        lambda m: pa.Nystrom(**START)(**m.x, segment_ids=m.ids),
        lambda m: pa.Nystrom(**{**START, "start": "matrix"})(**m.x, segment_ids=m.ids),
    ),
    Advice(
        "give grid=5, which fixes no number of rows, or put them in the batch",
        lambda m: GRID(**m.one, segment_ids=m.ids[:1] * 0),
        lambda m: [pa.Windowed(size=(1, 5), grid=5)(**m.one, segment_ids=m.ids[:1] * 0)],
    ),
    Advice(
        "write to a copy of it, or pull back first",
        lambda m: pulled_before(m, lambda _, x, pull: (x["q"].zero_(), pull())),
        lambda m: pulled_before(m, lambda _, x, pull: (x["q"].clone().zero_(), pull())),
    ),
]


@pytest.mark.parametrize("advice", ADVICE, ids=[advice.says for advice in ADVICE])
def test_a_call_that_a_refusal_advises_works(advice):
    made = Made()
    with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(advice.says)):
        advice.refused(made)
    advice.advised(made)

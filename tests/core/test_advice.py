"""A refusal that says what to do instead is right: what it advises works."""

import itertools
import re

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from tests.core.test_cupy_stand_in import make_inputs
from tests.core.test_shared_memory import arrays_of

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


FREE, LUCID, LINEAR = pa.Softmax(causal=False), pa.Lucid(), pa.Linear()
WINDOW, GRID = pa.Softmax(window=3), {"size": (1, 5), "grid": (1, 5)}
START = {"landmarks": 2, "start": "batch"}
X = make_inputs(FREE)
FEW, ONE = {**X, "q": X["q"][:, :3]}, {name: array[:1] for name, array in X.items()}
IDS = np.asarray([[0, 0, 1, 1, 1]] * 2)


def filled(mechanism, **options):
    return mechanism.extend(mechanism.init_cache(**X, **options), **X)[1]


def restored(mechanism, **options):
    snapshot = mechanism.init_cache(**X, **options).snapshot()
    filled(mechanism, **options).restore(snapshot)


def pulled_after(act):
    pytest.importorskip("torch")
    x = arrays_of("torch", X)
    out, pullback = LUCID.vjp(**x)
    act(x["q"])
    pullback(out)


ADVICE = [
    (
        "use key_mask",
        lambda: FREE(**FEW, lengths=[5, 4]),
        lambda: FREE(**FEW, key_mask=np.arange(5) < np.asarray([[5], [4]])),
    ),
    *(
        (
            "take a snapshot() before the tokens, and restore() it",
            lambda m=m, options=options: filled(m, **options).crop(1),
            lambda m=m, options=options: restored(m, **options),
        )
        for m, options in ((LINEAR, {}), (WINDOW, {"capacity": 90}))
    ),
    (
        'start="matrix" is expected',
        lambda: pa.Nystrom(**START)(**X, segment_ids=IDS),
        lambda: pa.Nystrom(**{**START, "start": "matrix"})(**X, segment_ids=IDS),
    ),
    (
        "give grid=5, which fixes no number of rows, or put them in the batch",
        lambda: pa.Windowed(**GRID)(**ONE, segment_ids=IDS[:1] * 0),
        lambda: pa.Windowed(**{**GRID, "grid": 5})(**ONE, segment_ids=IDS[:1] * 0),
    ),
    (
        "write to a copy of it, or pull back first",
        lambda: pulled_after(lambda q: q.zero_()),
        lambda: pulled_after(lambda q: q.clone().zero_()),
    ),
]


@pytest.mark.parametrize(("says", "refused", "advised"), ADVICE, ids=[says for says, *_ in ADVICE])
def test_a_call_that_a_refusal_advises_works(says, refused, advised):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=re.escape(says)):
        refused()
    advised()

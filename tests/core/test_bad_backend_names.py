"""Unknown backends and verbs, and calls that `explain` cannot plan, are refused."""

import numpy as np
import pytest

import precondattn as pa
from tests.core.bad_input import SOFTMAX, K, Q, V, cache_for, every_verb, refuses

NAMES = "backend must be a name or a tuple of names; found "


@every_verb
@pytest.mark.parametrize(
    ("backend", "error", "text"),
    [
        ("tritn", ValueError, "unknown backend 'tritn'; known are "),
        ("", ValueError, "unknown backend ''; known are "),
        (("reference", "tritn"), ValueError, "unknown backend 'tritn'; known are "),
        ((), TypeError, f"{NAMES}()"),
        (("reference", 3), TypeError, f"{NAMES}('reference', 3)"),
        (3, TypeError, f"{NAMES}3"),
        (True, TypeError, f"{NAMES}True"),
        (b"reference", TypeError, f"{NAMES}b'reference'"),
    ],
    ids=["misspelt", "empty", "one-of-two", "none", "one-no-name", "number", "boolean", "bytes"],
)
def test_an_unknown_backend_is_refused(verb, backend, error, text):
    refuses(lambda: verb(SOFTMAX, Q, K, V, backend=backend), error, text)


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        ((), TypeError, f"{NAMES}()"),
        ((3,), TypeError, f"{NAMES}(3,)"),
        (("reference", "tritn"), ValueError, "unknown backend 'tritn'; known are "),
    ],
    ids=["none", "number", "misspelt"],
)
def test_use_backend_refuses_unknown_names_on_entry(names, error, text):
    refuses(lambda: pa.use_backend(*names).__enter__(), error, text)


@pytest.mark.parametrize("verb", ["backward", "extend", "", None])
def test_explain_refuses_an_unknown_verb(verb):
    text = f"softmax: verb must be 'forward' or 'vjp' (for extend, pass the cache); found {verb!r}"
    refuses(lambda: SOFTMAX.explain(Q, K, V, verb=verb), ValueError, text)


def test_explain_refuses_a_cache_with_arguments_of_a_full_call():
    text = "softmax: segment_ids divides an extension into several; explain one of them, without"
    packed = {"segment_ids": np.zeros((2, 4), int)}
    refuses(lambda: SOFTMAX.explain(Q, K, V, cache=cache_for(), **packed), ValueError, text)


def test_a_gradient_through_a_cache_of_tokens_is_refused():
    text = "softmax: extend_vjp needs a cache of states, and this cache stores tokens; use vjp of a"
    for verb in (SOFTMAX.extend_vjp, lambda *x: SOFTMAX.explain(*x[1:], cache=x[0], verb="vjp")):
        refuses(lambda verb=verb: verb(cache_for(), Q, K, V), TypeError, text)

"""Calls of one signature are checked and planned once, and every call is still its own."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.dispatch.discovery import register_backend, unregister_backend
from precondattn.dispatch.reference import Reference
from precondattn.execution import preparation
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("test", b=2, t=6, s=6, h=2, n=2, d=4, e=4)


def arrays_of(mechanism, library, layout=LAYOUT):
    x = make_inputs(mechanism, layout, "random")
    if library == "torch":
        torch = pytest.importorskip("torch")
        return {name: torch.tensor(array) for name, array in x.items()}
    if library == "jax":
        jnp = pytest.importorskip("jax.numpy")
        return {name: jnp.asarray(array, dtype=jnp.float32) for name, array in x.items()}
    return x


def preparations(monkeypatch):
    """A list that gets the verb of every call that is prepared from now on."""
    verbs, plan = [], preparation._planned

    def counted(call, *rest, **named):
        verbs.append(call.verb)
        return plan(call, *rest, **named)

    monkeypatch.setattr(preparation, "_planned", counted)
    preparation.prepared_calls.clear()
    return verbs


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_a_second_call_of_the_same_signature_is_not_prepared_again(monkeypatch, library):
    m = pa.parse("gated_delta")
    x = arrays_of(m, library)
    verbs = preparations(monkeypatch)
    first, second = m(**x), m(**x)
    assert verbs == ["forward"]
    np.testing.assert_array_equal(first, second)
    cache = m.init_cache(**x)
    for _ in range(3):
        _, cache = m.extend(cache, **x)
    assert verbs == ["forward", "extend"]
    m.vjp(**x)
    m.vjp(**x)
    assert verbs == ["forward", "extend", "vjp"]


def test_whatever_a_plan_depends_on_is_a_signature_of_its_own(monkeypatch):
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    ids = torch.zeros((1, 4), dtype=torch.int32)
    m = pa.Softmax()
    verbs = preparations(monkeypatch)
    with torch.no_grad():
        m(q, k, v)
    calls = [
        lambda: m(q, k, v),  # Gradients are enabled.
        lambda: m(q, k, v.clone().requires_grad_()),
        lambda: m(q[:, :2], k, v),
        lambda: m(q.double(), k.double(), v.double()),
        lambda: m(q, k, v=v),
        lambda: m(q, k, v, segment_ids=ids),
        lambda: m(q, k, v, key_mask=ids == 0),
        lambda: m(q, k, v, lengths=[3]),
        lambda: m(q, k, v, lengths=ids[0, :1]),
        lambda: m(q, k, v, backend="reference"),
        lambda: pa.Softmax(window=2)(q, k, v),
    ]
    for number, call in enumerate(calls, 2):
        call()
        call()
        assert len(verbs) == number
    with torch.autocast("cpu", torch.bfloat16):
        assert m(q, k, v).dtype == m(q, k, v).dtype == torch.bfloat16
    assert len(verbs) == len(calls) + 2
    assert m(q, k, v).dtype == torch.float32
    with pa.use_backend("reference"):
        m(q, k, v)
    assert m.explain(q, k, v).backends == ("torch",)


@pytest.mark.parametrize("wrong", ["lengths", "segment_ids", "capacity"])
def test_entries_are_checked_in_every_call(wrong):
    m = pa.Lucid()
    x = arrays_of(m, "numpy")
    cache = m.init_cache(**x, capacity=8)
    good = {"lengths": np.array([6, 2]), "segment_ids": np.zeros((2, 6), dtype=np.int32)}
    bad = {"lengths": np.array([6, 7]), "segment_ids": np.array([[0, 0, 1, 1, 0, 0]] * 2, np.int32)}
    if wrong == "capacity":
        _, cache = m.extend(cache, **x)
        with pytest.raises(ValueError, match="capacity exceeded"):
            m.extend(cache, **x)
        return
    expected = m(**x, **{wrong: good[wrong]})
    bad_key = x["k"].copy()
    bad_key[0, 4] = np.nan  # It is contained in every call, too.
    out = m(**x | {"k": bad_key}, **{wrong: good[wrong]})
    assert np.isnan(out[0, 4:]).all()
    np.testing.assert_allclose(out[0, :4], expected[0, :4], rtol=1e-6)
    with pytest.raises(ValueError, match=wrong):
        m(**x, **{wrong: bad[wrong]})


def test_a_backend_that_is_registered_later_is_used_by_the_next_call():
    class Other(Reference):
        name = "other"
        preference = 1000

    m = pa.Softmax()
    x = arrays_of(m, "numpy")
    m(**x)
    seen = []
    Other.prepare = lambda self, *asked: seen.append(asked) or Reference.prepare(self, *asked)
    register_backend(Other)
    try:
        m(**x)
        assert len(seen) == 1
    finally:
        unregister_backend("other")
    m(**x)
    assert len(seen) == 1


def test_transformed_and_counted_calls_have_no_signature(monkeypatch):
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = torch.randn(3, 1, 4, 2, 8)
    m = pa.Lucid()
    m(q, k, v)
    kept = dict(preparation.prepared_calls)
    torch.func.grad(lambda q: m(q, k, v).sum())(q)
    torch.func.vmap(lambda q: m(q, k, v))(q[None])
    torch.func.jvp(lambda q: m(q, k, v), (q,), (q,))
    with FlopCounterMode(display=False) as counter:
        m(q, k, v)
    assert counter.get_total_flops() > 0
    assert preparation.prepared_calls == kept

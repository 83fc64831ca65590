"""Calls of one signature are checked and planned once; a later one takes few Python calls."""

import sys

import numpy as np
import pytest

import precondattn as pa
from precondattn.dispatch.reference import Reference
from precondattn.execution import preparation
from tests.core.inputs import inputs_of


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
    x = inputs_of(m, library, t=6)
    verbs = preparations(monkeypatch)
    np.testing.assert_array_equal(m(**x), m(**x))
    cache = m.init_cache(**x)
    for _ in range(3):
        _, cache = m.extend(cache, **x)
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


def test_entries_are_checked_in_every_call():
    m = pa.Lucid()
    x = inputs_of(m, t=6)
    torn = np.array([[0, 0, 1, 1, 0, 0]] * 2, np.int32)
    for name, good, bad in (
        ("lengths", np.array([6, 2]), np.array([6, 7])),
        ("segment_ids", np.zeros((2, 6), dtype=np.int32), torn),
    ):
        expected = m(**x, **{name: good})
        bad_key = x["k"].copy()
        bad_key[0, 4] = np.nan  # It is contained in every call, too.
        out = m(**x | {"k": bad_key}, **{name: good})
        assert np.isnan(out[0, 4:]).all()
        np.testing.assert_allclose(out[0, :4], expected[0, :4], rtol=1e-6)
        with pytest.raises(ValueError, match=name):
            m(**x, **{name: bad})
    _, cache = m.extend(m.init_cache(**x, capacity=8), **x)
    with pytest.raises(ValueError, match="capacity exceeded"):
        m.extend(cache, **x)


def test_a_backend_that_is_registered_later_is_used_by_the_next_call():
    class Other(Reference):
        name = "other"
        preference = 1000

        def prepare(self, piece, request):
            return type("Zeros", (pa.Runner,), {"forward": lambda _, x, frame: (0 * x["v"], ())})()

    x = inputs_of("softmax", t=6, h=2)
    assert pa.softmax(**x).any()
    pa.register_backend(Other())
    assert not pa.softmax(**x).any()
    pa.unregister_backend("other")
    assert pa.softmax(**x).any()


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


LIMITS = {  # Python calls, and the files that they are in
    (pa.Softmax, "numpy"): (90, 15),
    (pa.Lucid, "numpy"): (180, 20),
    (pa.Softmax, "torch"): (20, None),
    (pa.Lucid, "torch"): (65, None),
}


def traced(call):
    """The code of every Python function of this project that a call enters."""
    codes = []

    def note(frame, event, _):
        is_ours = frame.f_globals.get("__name__", "").startswith("precondattn")
        if event == "call" and is_ours and frame.f_code.co_filename != "<string>":
            codes.append(frame.f_code)  # The methods of dataclasses are not in a file.

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return codes


@pytest.mark.parametrize(("cls", "library"), LIMITS)
def test_a_warm_call_takes_few_calls_in_few_files(cls, library):
    asarray = pytest.importorskip(library).asarray
    q, k, v = map(
        asarray, np.random.default_rng(0).normal(size=(3, 1, 64, 2, 16)).astype("float32")
    )
    mechanism = cls()
    mechanism(q, k, v)
    codes = traced(lambda: mechanism(q, k, v))
    most_calls, most_files = LIMITS[cls, library]
    files = {code.co_filename for code in codes}
    listed = "\n".join(sorted(f"{code.co_filename}: {code.co_qualname}" for code in codes))
    assert len(codes) <= most_calls, listed
    assert most_files is None or len(files) <= most_files, listed


def test_a_call_with_arrays_of_numpy_enters_no_file_of_another_framework():
    q = np.random.default_rng(0).normal(size=(1, 6, 2, 4))
    codes = traced(lambda: pa.lucid(q, q, q))
    assert codes
    assert not [c for c in codes if "/torch/" in c.co_filename or "/jax/" in c.co_filename]

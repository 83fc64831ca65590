"""What caches hold, and what a step costs: in memory, in products, and in the arrays it reads.

That any split gives the output of the full call is the conformance check `caching`.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frameworks import of
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens

LENGTH = 12


def inputs_of(m, kind="clustered", **sizes):
    return make_inputs(m, CallLayout("test", t=LENGTH, s=LENGTH, **sizes), kind)


VIEWS = {
    "read-only": lambda a: of(a).read_only(np.concatenate([a, a])),
    "broadcast": lambda a: np.broadcast_to(a, (2, *a.shape[1:])),
    "expanded": lambda a: pytest.importorskip("torch").tensor(a).expand(2, *a.shape[1:]),
}
DONATING = {
    "one token": lambda m, x, c, **d: m.extend(c, **slice_tokens(m, x, 6, 7), **d)[1],
    "lengths": lambda m, x, c, **d: m.extend(c, **slice_tokens(m, x, 6, 9), lengths=[3, 1], **d)[1],
    "crop": lambda m, x, c, **d: c.crop([2, 5], **d) if c.can_crop else c,
    "restore": lambda m, x, c, **d: c.restore(c.snapshot(), **d),
}


@pytest.mark.parametrize(
    ("expression", "view", "operation"),
    [
        ("softmax", "broadcast", "crop"),
        ("softmax", "expanded", "lengths"),
        ("softmax[window=3]", "broadcast", "one token"),
        ("softmax[window=3]", "expanded", "restore"),
        ("lucid(path)", "read-only", "restore"),
        ("lucid(path)", "expanded", "one token"),
        ("gla", "expanded", "one token"),
        ("gla", "broadcast", "restore"),
    ],
)
def test_a_donated_cache_that_can_not_be_written_to_is_copied_once(expression, view, operation):
    m, run, viewed = pa.parse(expression), DONATING[operation], VIEWS[view]
    made = inputs_of(m, b=1)
    _, old = m.extend(m.init_cache(**made, capacity=LENGTH), **slice_tokens(m, made, 0, 6))
    x, store = ({n: viewed(a) for n, a in arrays.items()} for arrays in (made, old.store))
    cache = old._replace(length=viewed(old.length), store=dict(store))
    expected, after = run(m, x, cache), run(m, x, cache, donate=True)
    for name, buffer in after.store.items():
        np.testing.assert_array_equal(store[name], np.concatenate([old.store[name]] * 2))
        np.testing.assert_allclose(buffer, expected.store[name], rtol=1e-12, atol=1e-14)
    last, buffers = slice_tokens(m, x, 9, 10), dict(after.store)
    after = m.extend(after, **last, donate=True)[1]
    assert operation == "crop" or all(after.store[name] is buffers[name] for name in buffers)


@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys", "rows"])
def test_the_cache_of_lucid_stores_y_after_a_prefill_and_after_one_token(normalize):
    m = pa.Lucid(normalize=normalize)
    x = inputs_of(m)
    x["k"] = 0.5 * x["k"]
    _, cache = m.extend(m.init_cache(**x, capacity=20), **slice_tokens(m, x, 0, LENGTH - 1))
    _, cache = m.extend(cache, **slice_tokens(m, x, LENGTH - 1, LENGTH))
    k = x["k"] if normalize != "queries_and_keys" else pa.RMSNorm()(x["k"])
    expected = {"y": m.solve()(k, x["v"]), "rms(k)": np.sqrt(np.mean(k**2, axis=-1) + 1e-6)}
    assert ("v" in cache.store, "rms(k)" in cache.store) == (False, normalize == "keys")
    for name in {*expected} & {*cache.store}:
        np.testing.assert_allclose(
            cache.store[name][:, :LENGTH], expected[name], rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("expression", ["softmax", "lucid(laser)", "path[flush=8]", "lucid(path)"])
def test_the_work_of_a_decoded_token_grows_linearly_with_the_context(expression):
    torch = pytest.importorskip("torch")
    counter_of = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
    m = pa.parse(expression)
    products = []
    for context in (64, 128, 256):
        layout = CallLayout("test", t=context, s=context, d=16, e=16)
        x = {n: torch.tensor(a) for n, a in make_inputs(m, layout, "random").items()}
        cache = m.init_cache(**x, capacity=context)
        _, cache = m.extend(cache, **slice_tokens(m, x, 0, context - 1))
        with counter_of(display=False) as counter:
            m.extend(cache, **slice_tokens(m, x, context - 1, context))
        products.append(counter.get_total_flops())
    assert products[1] <= 2.1 * products[0]
    assert products[2] <= 2.1 * products[1]


HELD, SMALL, LARGE = 64, 256, 8192

MECHANISMS = (
    "softmax",
    "softmax[window=3]",
    "softmax[forget=unscaled]",
    "laser",
    "lucid",
    "lucid(laser)",
    "path[forget=scaled,flush=3]",
    "lucid(path)",
    "ccq[covariance=query_weighted](linear)",
    "gated_delta",
)


def largest_mode(torch):
    """A mode that records the most entries of an array that is computed with, but for views."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            results = function._schema.returns
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in results)
            # These access the rows of an index only.
            of_rows = torch.ops.aten.index_put_.default, torch.ops.aten.index.Tensor
            if not is_view and function not in of_rows:
                for x in tree_leaves((args, kwargs, out)):
                    if isinstance(x, torch.Tensor):
                        self.entries = max(self.entries, x.numel())
            return out

    return Largest()


def largest_array_of_a_step(mechanism, capacity, lengths):
    torch = pytest.importorskip("torch")
    made = make_inputs(mechanism, CallLayout("test", b=2, t=HELD + 1, s=HELD + 1), "random")
    x = {name: torch.as_tensor(array) for name, array in made.items()}
    cache = mechanism.init_cache(**x, capacity=capacity)
    with torch.no_grad():
        prompt = slice_tokens(mechanism, x, 0, HELD)
        _, cache = mechanism.extend(cache, **prompt, lengths=lengths, donate=True)
        with largest_mode(torch) as largest:
            mechanism.extend(cache, **slice_tokens(mechanism, x, HELD, HELD + 1), donate=True)
    return largest.entries


@pytest.mark.parametrize("expression", MECHANISMS)
def test_a_donated_step_computes_with_no_array_that_grows_with_the_capacity(expression):
    mechanism = pa.parse(expression)
    for lengths in (None, (HELD, HELD - 5)):
        small, large = (largest_array_of_a_step(mechanism, c, lengths) for c in (SMALL, LARGE))
        assert large == small


@pytest.mark.parametrize("whole", [np.int64, np.uint8, np.asarray])
def test_an_integer_of_any_type_is_a_whole_number_and_a_boolean_is_none(whole):
    q, m = np.ones((1, 4, 2, 3)), pa.Linear()
    cache = pa.Lucid().init_cache(q, q, q, capacity=whole(8), sequences=whole(1))
    assert cache.grow(whole(9)).crop(whole(0)).capacity == 9
    m.extend(m.init_cache(q, q, q), q, q, q, keep=whole(2))
    assert str(pa.Path(window=whole(3), flush=whole(2))) == "path[window=3,flush=2]"
    assert pa.alignment(q, whole(2)).shape == (1, 4, 2)
    for refused in (True, np.bool_(True), 2.0):
        with pytest.raises(ValueError, match="capacity must be a whole number, 1 or above"):
            m.init_cache(q, q, q, capacity=refused)

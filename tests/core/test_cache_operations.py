"""Operations on caches: their errors, memory, traces, gradients and saved forms.

That they agree with the mathematics, for every mechanism, is the conformance check `cache
operations`.
"""

import re
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

import precondattn as pa
from precondattn.version import numbers_of
from precondattn_conformance import libraries
from precondattn_conformance.inputs import CallLayout, make_inputs, slice_tokens
from tests.core.inputs import inputs_of

LENGTH, CAPACITY = 9, 12
CROPPED = pa.Lucid()


def cache_of(m, library="numpy", dtype="float64", held=6):
    """The inputs, and a cache of their first `held` tokens, computed in NumPy for speed."""
    lib = libraries.named(library)
    x = make_inputs(m, CallLayout("test", b=3, t=LENGTH, s=LENGTH), "random")
    cache = m.init_cache(**x, capacity=CAPACITY)
    _, cache = m.extend(cache, **slice_tokens(m, x, 0, held))
    x, arrays = (
        {name: lib.array(array, dtype) for name, array in arrays.items()}
        for arrays in (x, cache.state_dict())
    )
    return x, pa.Cache.from_state_dict(arrays)


def assert_equal(left, right):
    np.testing.assert_array_equal(left.length, right.length)
    assert left.kinds == right.kinds
    assert set(left.store) == set(right.store)
    for name, buffer in left.store.items():
        np.testing.assert_array_equal(buffer, right.store[name], err_msg=name)


@pytest.mark.parametrize("expression", ["gla", "path", "softmax[forget=unscaled]"])
def test_what_can_not_be_cropped_says_so_and_names_snapshot(expression):
    _, cache = cache_of(pa.parse(expression))
    assert not cache.can_crop
    with pytest.raises(ValueError, match=r"can not be cropped.* snapshot\(\).*restore\(\)"):
        cache.crop(2)


BAD_VALUES = [
    (lambda c: c.crop(7), "crop: lengths must lie between 0 and the 6 tokens held; found 7"),
    (lambda c: c.crop([6, -1, 7]), "found -1 (sequence 1"),
    (lambda c: c.crop([6, 6]), "lengths must be 3 integers, one for each sequence; found 2"),
    (lambda c: c.reorder([0, 3]), "indices must lie between 0 and 2; found 3"),
    (lambda c: c.reorder([-1]), "between 0 and 2; found -1"),
    (lambda c: c.select([0, 0]), "at most once"),
    (lambda c: c.select([True, False]), "a mask must have 3 entries"),
    (lambda c: c.select(np.ones((3, 1), bool)), "must have shape (3,); found (3, 1)"),
    (lambda c: c.grow(11), "capacity must be 12 or above"),
    (lambda c: c.to(dtype=None, device="cuda"), "arrays of numpy are on 'cpu'"),
    (lambda c: pa.Cache.concatenate([c, c.to(dtype="float32")]), "float32"),
    (lambda c: pa.Cache.concatenate([c, cache_of(pa.GLA())[1]]), "one mechanism"),
    (lambda c: c.restore(c.select([0]).snapshot()), "of another cache"),
    (lambda c: c.crop(3).restore(c.snapshot()), "the 3 tokens held; found 6"),
    (lambda c: pa.Cache(c.length, c.store).crop(1), "does not say what"),
    (lambda c: pa.Cache.from_state_dict({}), "missing ['version', 'length']"),
    (lambda c: pa.Cache.from_state_dict({**c.state_dict(), "k": c.length}), "unknown ['k']"),
]
BAD_TYPES = [
    (lambda c: c.crop(True), "lengths must be a whole number"),
    (lambda c: c.crop([1, 2, 3.5]), "lengths must be whole numbers"),
    (lambda c: c.crop(np.ones(3)), "integers with one axis; found float64"),
    (lambda c: c.reorder(1), "indices must be a list of integers or an array"),
    (lambda c: c.grow(12.0), "capacity must be a whole number; found 12.0"),
    (lambda c: c.to(), "pass a device, a dtype, or both"),
    (lambda c: c.to(dtype="int32"), "dtype must be float16"),
    (lambda c: pa.Cache.concatenate([]), "one or more caches"),
    (lambda c: pa.Cache.concatenate([c, 3]), "one or more caches"),
    (lambda c: c.restore(c), "a Snapshot from snapshot() expected; found Cache"),
    (lambda c: pa.Cache.from_state_dict({**c.state_dict(), "tokens: k": [1]}), "found list"),
]


@pytest.mark.parametrize(
    ("error", "operation", "words"),
    [
        *((ValueError, *row) for row in BAD_VALUES),
        *((TypeError, *row) for row in BAD_TYPES),
    ],
)
def test_bad_arguments(error, operation, words):
    _, cache = cache_of(CROPPED)
    with pytest.raises(error, match=re.escape(words)):
        operation(cache)


@pytest.mark.parametrize(
    ("verb", "expression", "stop", "library"),
    [
        ("extend", "lucid", "execution.evaluation.updated", "numpy"),
        ("extend", "gla", "execution.evaluation.updated", "torch"),
        ("extend", "lucid", "execution.evaluation.updated", "jax"),
        ("extend", "softmax[window=3]", "execution.windows.moved_on", "numpy"),
        ("crop", "lucid", "cache.crop._without_rows", "torch"),
        ("crop", "lucid", "cache.crop.without_kept", "jax"),
        ("restore", "gla", "cache.snapshots.writes_in_place", "numpy"),
        ("restore", "gla", "cache.crop.without_kept", "torch"),
        ("restore", "gla", "cache.crop.without_kept", "jax"),
    ],
)
def test_a_cache_that_was_donated_is_refused(verb, expression, stop, library, monkeypatch):
    """The call that it was donated to may have failed half-way."""
    pytest.importorskip(library)
    m = pa.parse(expression)
    x, cache = cache_of(m, library, "float32")
    before, new = cache.snapshot(), slice_tokens(m, x, 6, 7)
    _, cache = m.extend(cache, **new, **({"keep": 1} if expression == "gla" else {}))
    verbs = {
        "extend": lambda: m.extend(cache, **new, donate=True),
        "crop": lambda: cache.crop(3, donate=True),
        "restore": lambda: cache.restore(before, donate=True),
    }
    monkeypatch.setattr(f"precondattn.{stop}", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        verbs[verb]()
    monkeypatch.undo()
    for again in (*verbs.values(), lambda: cache.reorder([0]), cache.snapshot):
        with pytest.raises(ValueError, match="was donated"):
            again()


@pytest.mark.parametrize(
    ("expression", "library"),
    [("lucid(laser)", "torch"), ("gla", "numpy"), ("path", "numpy"), ("ccq(softmax)", "torch")],
)
def test_a_new_cache_has_the_same_memory_layout_and_shares_no_memory(expression, library):
    pytest.importorskip(library)
    m = pa.parse(expression)
    # An empty cache, because a step may give rewritten rows another layout.
    cache = m.init_cache(**cache_of(m, library)[0], capacity=CAPACITY)
    for new in (
        cache.crop(0) if cache.can_crop else cache,
        cache.restore(cache.snapshot()),
        cache.reorder([2, 0, 1, 1]),
        cache.select(cache.length != cache.length[0] + 1),
        cache.grow(20),
        cache.to(device="cpu", dtype="float64"),
        pa.Cache.concatenate([cache]),
        pa.Cache.from_state_dict(cache.state_dict()),
    ):
        for name, buffer in new.store.items():
            old = cache.store[name]
            assert order_in_memory(buffer) == order_in_memory(old), name
            assert new is cache or not np.shares_memory(np.asarray(buffer), np.asarray(old)), name


def order_in_memory(buffer):
    """The axes, from the largest stride to the smallest."""
    strides = buffer.stride() if hasattr(buffer, "stride") else buffer.strides
    return sorted(range(buffer.ndim), key=lambda axis: (-strides[axis], axis))


@pytest.mark.parametrize(("donate", "lengths"), [(False, [3, 0, 5]), (True, [3, 0, 5]), (True, 3)])
def test_cropped_tokens_leave_no_trace(donate, lengths):
    """A NaN in a token that is left out, and a masked key, have no effect."""
    x, _ = cache_of(CROPPED)
    changed = {name: array.copy() for name, array in x.items()}
    for array in changed.values():
        array[:, 5] = np.nan
    mask = np.tile(np.arange(LENGTH) < 4, (3, 1))
    mask[1, 1] = False

    def filled(inputs, tokens, **lengths):
        cache = CROPPED.init_cache(**x, capacity=CAPACITY, key_mask=True)
        new = slice_tokens(CROPPED, inputs, 0, tokens)
        return CROPPED.extend(cache, **new, key_mask=mask[:, :tokens], **lengths)[1]

    cache = filled(changed, 7)
    buffers = dict(cache.store)
    cropped = cache.crop(lengths, donate=donate)
    assert_equal(cropped, filled(x, 5, lengths=np.broadcast_to(lengths, 3)))
    assert all((cropped.store[name] is buffers[name]) == donate for name in buffers)


def is_invalid(cache):
    """Whether `extend` gives NaN, for each sequence."""
    length, capacity = np.asarray(cache.length), cache.capacity
    return ((length < 0) | (length > (length if capacity is None else capacity))).tolist()


def test_traced_arguments_out_of_range_make_a_sequence_invalid_and_it_stays_so():
    jax = pytest.importorskip("jax")
    _, cache = cache_of(CROPPED, "jax", "float32")
    reordered = jax.jit(lambda c, i: c.reorder(i))(cache, jax.numpy.asarray([-1, 0, 3]))
    assert is_invalid(reordered) == [True, False, True]
    full = jax.jit(lambda c, n: c.crop(n))(cache, jax.numpy.asarray([6, 7, -1]))
    for kept in (full, full.grow(60), full.to(dtype="float64")):
        assert is_invalid(kept) == [False, True, True]
    assert is_invalid(full.reorder([1, 0])) == [True, False]
    assert is_invalid(pa.Cache.concatenate([full, cache.grow(20)]))[:3] == [False, True, True]
    with pytest.raises(ValueError, match="sequence 1 of the batch has lost tokens"):
        full.crop(2)
    with pytest.raises(TypeError, match="a traced mask"):
        jax.jit(lambda c, mask: c.select(mask))(cache, cache.length > 0)


def everything(cache, indices, lengths, crops=True):
    """All operations that can be traced."""
    if crops:
        cache = cache.crop(lengths)
    before = cache.snapshot()
    cache = cache.restore(before).reorder(indices).grow(20)
    return pa.Cache.concatenate([cache, cache.select([0])])


@pytest.mark.parametrize("expression", ["lucid", "path"])
def test_operations_under_jit(expression):
    jax = pytest.importorskip("jax")
    arguments = [2, 0, 0], [1, 2, 6]
    _, cache = cache_of(pa.parse(expression), "jax", "float32")
    traced = partial(everything, crops=cache.can_crop)
    expected = traced(cache_of(pa.parse(expression))[1].to(dtype="float32"), *arguments)
    assert_equal(jax.jit(traced)(cache, *map(jax.numpy.asarray, arguments)), expected)
    assert len(jax.tree.leaves(cache)) == 1 + len(cache.store)


def test_operations_in_one_graph_of_torch_compile():
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    compiled = torch.compile(everything, backend="eager", fullgraph=True)
    arguments = (torch.tensor([2, 0, 0]), torch.tensor([1, 2, 6]))
    _, cache = cache_of(CROPPED, "torch")
    assert_equal(compiled(cache, *arguments), everything(cache, *arguments))


@pytest.mark.parametrize("expression", ["lucid", "gla"])
def test_operations_are_differentiated_in_torch(expression):
    torch = pytest.importorskip("torch")
    _, cache = cache_of(pa.parse(expression), "torch")

    def operated(*buffers):
        store = dict(zip(cache.store, buffers, strict=True))
        new = everything(cache._replace(store=store), [2, 0, 0], [1, 2, 6], cache.can_crop)
        return tuple(new.store.values())

    leaves = tuple(buffer.requires_grad_() for buffer in cache.store.values())
    assert torch.autograd.gradcheck(operated, leaves, fast_mode=True)
    if cache.can_crop:
        with pytest.raises(ValueError, match=r"under torch\.no_grad"):
            cache.crop(1, donate=True)


def test_wide_buffers_stay_in_float32():
    torch = pytest.importorskip("torch")
    m = pa.Lucid()
    x, cache = cache_of(m, "torch", "float32")
    half = cache.to(dtype=torch.bfloat16)
    new = {n: a.bfloat16() for n, a in slice_tokens(m, x, 6, 7).items()}
    m.extend(half, **new)
    dtypes = {"k": torch.bfloat16, "y": torch.bfloat16, "rms(k)": torch.float32}
    for made in (half, m.init_cache(**new, capacity=CAPACITY)):
        assert {n: a.dtype for n, a in made.store.items()} == dtypes
    assert {a.dtype for a in half.to(dtype="float64").store.values()} == {torch.float64}
    assert half.to(device="meta").length.is_meta


def test_jax_without_float64_refuses_it():
    jax = pytest.importorskip("jax")
    _, cache = cache_of(CROPPED, "jax", "float32")
    with jax.enable_x64(False), pytest.raises(TypeError, match="jax has no float64 here"):
        cache.to(dtype="float64")


def by_torch(state, folder):
    torch = pytest.importorskip("torch")
    torch.save(state, folder / "cache.pt")
    return torch.load(folder / "cache.pt", weights_only=True)


def by_numpy(state, folder):
    np.savez(folder / "cache.npz", **state)
    return dict(np.load(folder / "cache.npz"))


def by_orbax(state, folder):
    orbax = pytest.importorskip("orbax.checkpoint")
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "cache", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "cache")


@pytest.mark.parametrize(
    ("expression", "library", "saved"),
    [
        *(("path", "torch", by_torch), ("ccq(softmax)", "torch", by_torch)),
        *(("lucid", "numpy", by_numpy), ("lucid", "jax", by_orbax)),
    ],
)
def test_a_saved_cache_is_the_same_cache(expression, library, saved, tmp_path):
    pytest.importorskip(library)
    m = pa.parse(expression)
    x, cache = cache_of(m, library, "float32")
    loaded = pa.Cache.from_state_dict(saved(cache.state_dict(), tmp_path))
    assert_equal(loaded, cache)
    if library == "torch":
        empty = m.init_cache(**x, capacity=CAPACITY)
        for name, buffer in loaded.store.items():
            assert order_in_memory(buffer) == order_in_memory(empty.store[name]), name


def test_the_version_that_saved_an_unknown_buffer_is_named():
    _, cache = cache_of(CROPPED)
    saved = cache.state_dict()
    saved |= {"version": saved["version"] + 1, "folded: k": saved["length"]}
    newer = ".".join(str(number + 1) for number in numbers_of(pa.__version__))
    words = f"unknown ['folded: k']; precondattn {newer} saved it, and this is {pa.__version__}"
    with pytest.raises(ValueError, match=re.escape(words)):
        pa.Cache.from_state_dict(saved)


@pytest.fixture
def strict():
    """array_api_strict, with every optional feature off in these tests."""
    return pytest.importorskip("array_api_strict")


@pytest.mark.parametrize("expression", ["softmax", "gated_delta"])
def test_operations_on_caches_take_arrays_of_the_library_on_its_device(expression, strict):
    m, device = pa.parse(expression), strict.Device("device1")
    made = inputs_of(m, kind="clustered", b=1, t=5)

    def saved(asarray, name):
        x = {name: asarray(array) for name, array in made.items()}
        rows, ends = asarray(np.asarray([0, 1])), asarray(np.asarray([0, 2, 5]))
        empty = m.init_cache(**x, capacity=9, sequences=2)
        cache = m.extend(empty, **x, cu_seqlens=ends, keep=1)[1].crop(rows + 1)
        parts = cache.select(rows > 0), cache.reorder(rows).restore(empty.snapshot()).grow(12)
        return pa.Cache.concatenate(parts).to(device=name).state_dict()

    with strict.ArrayAPIStrictFlags(
        boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()
    ):
        found = saved(lambda array: strict.asarray(array, device=device), "device1")
    for name, expected in saved(np.asarray, "cpu").items():
        assert found[name].device == device
        np.testing.assert_allclose(np.from_dlpack(found[name]), expected, rtol=0, atol=1e-12)


def test_the_suite_refuses_optional_features_and_arrays_of_another_device(strict):
    library = libraries.named("array_api_strict")
    with library.precision("float64"):
        array = library.array(np.ones(2))
        with pytest.raises(RuntimeError, match="data_dependent_shapes"):
            strict.unique_values(array)
        with pytest.raises(RuntimeError, match="boolean_indexing"):
            array[array > 0]
        with pytest.raises(ValueError, match="must be on the inputs' device1; found"):
            library.numpy(strict.ones(2))
        np.testing.assert_array_equal(library.numpy(array), np.ones(2))

"""The inputs decide the device and the dtype of what PyTorch computes, and no entry is read.

Lengths on an accelerator that the host knows: a tensor on the CPU stands in for one there.
"""

import gc
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import precondattn as pa
from precondattn.cache import append, known_lengths
from precondattn.cache.known_lengths import lengths_on_host, remembered
from precondattn.frameworks.torch.framework import PyTorch
from precondattn.layers.torch import Attention, Decoder, to_torch
from precondattn_conformance.inputs import slice_tokens
from tests.core.inputs import inputs_of

T = 6
X = torch.randn(1, T, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SOFTMAX, SSD, G = pa.Softmax(), pa.SSD(), -X[..., 0].abs()
MASKS = {
    "lengths": [4],
    "key_mask": torch.arange(T)[None] != 2,
    "segment_ids": torch.arange(T)[None] // 4,
    "cu_seqlens": [0, 2, T - 1],
    "prefix": [3],
    "attn_mask": torch.ones(1, 1, T, T).tril(-1).bool(),
}
TOKENS, VALID = torch.arange(T)[None], torch.arange(T)[None] > 0
LAYER = Attention(8, heads=2, mechanism="softmax", dtype=X.dtype)
MODEL = Decoder(T, 8, heads=2, layers=["softmax", "differential"], dtype=X.dtype)


def tensors_in(tree):
    """The tensors in tuples, dicts and caches, in their order."""
    if isinstance(tree, pa.Cache):
        return [tree.length, *tree.store.values()]
    items = tree.values() if isinstance(tree, dict) else tree
    return [tree] if isinstance(tree, torch.Tensor) else [t for x in items for t in tensors_in(x)]


def of_verbs(name):
    """What each verb returns with a mask."""
    mask, packed = {name: MASKS[name]}, name in ("segment_ids", "cu_seqlens")
    options = {"capacity": T, "key_mask": name == "key_mask", "sequences": 2 if packed else None}
    out, pullback = SOFTMAX.vjp(X, X, X, **mask)
    cache = SOFTMAX.init_cache(X, X, X, **options)
    found = [SOFTMAX(X, X, X, **mask), out, pullback(out), SOFTMAX.extend(cache, X, X, X, **mask)]
    if name not in ("prefix", "attn_mask"):
        states = SSD.init_cache(X, X, X, g=G, **options)
        *step, pullback = SSD.extend_vjp(states, X, X, X, g=G, **mask)
        found += [*step, pullback(X)]
    return found


def of_layers():
    """What a layer, a model, the operations of a cache and a conversion of weights return."""
    x = X.flatten(2)
    y, cache = LAYER(x, prefix=[2], cache=LAYER.init_cache(1, T))
    drawn = MODEL.generate(TOKENS, 3, mask=VALID, prefix=[2], stop=1)
    weights = to_torch({"a": {"kernel": np.ones((2, 1))}})
    copies = cache.select([0]), cache.reorder([0, 0]), cache.crop([2]), cache.grow(9)
    return y, cache, LAYER(x, cu_seqlens=[0, 2, T]), MODEL(TOKENS), drawn, weights, copies


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", [*MASKS, "layers"])
@pytest.mark.parametrize("default", [torch.device("meta"), default_dtype], ids=["device", "dtype"])
def test_no_default_changes_a_call(name, default):
    def called():
        return tensors_in(of_layers() if name == "layers" else of_verbs(name))

    expected = called()
    with default(torch.float16) if default is default_dtype else default:
        found = called()
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


def shapes_of(m, x):
    """Shapes and dtypes of outputs, of gradients in two ways, and of caches after two calls."""
    out, pullback = m.vjp(**x)
    given = {name: array.detach().requires_grad_() for name, array in x.items()}
    gradients = torch.autograd.grad(m(**given).sum(), [*given.values()])
    found = [m(**x), out, pullback(out), gradients]
    if m.offers.causal:
        cache = m.init_cache(**x, capacity=T)
        for start, stop in ((0, 4), (4, T)):
            after, cache = m.extend(cache, **slice_tokens(m, x, start, stop), donate=True)
            found += [after, cache]
    return [(tuple(array.shape), array.dtype) for array in tensors_in(found)]


SYMBOLIC = (
    *(
        "lucid",
        "nystrom[landmarks=5,skip=true]",
        "mlstm",
        "kda",
        "softmax[window=3]",
        "deltaformer",
    ),
    *("path[forget=scaled,flush=3]", "atk(gdn2)", "ccq"),
)
"""One mechanism of each kind of code: the sizes of its tensors are symbols, which takes long."""


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        *((text, "meta") for text in (*SYMBOLIC, "outlook[stride=2,grid=5]", "windowed")),
        *((text, "meta") for text in ("hedgehog(gla)", "mesa(gla)", "differential[per=token]")),
        *(("laser", "fake"), ("laser", "symbolic")),
        *(pytest.param(text, "symbolic", marks=pytest.mark.thorough) for text in SYMBOLIC[:3]),
        *(pytest.param(text, "symbolic", marks=pytest.mark.slow) for text in SYMBOLIC[3:]),
    ],
)
def test_tensors_without_entries_have_the_shapes_of_others(expression, kind):
    m = pa.parse(expression)
    made = inputs_of(m, "torch", "clustered", t=T, d=8, e=4)
    x = {name: array.float() for name, array in made.items()}
    expected = shapes_of(m, x)
    if kind == "meta":
        assert shapes_of(m, {name: array.to("meta") for name, array in x.items()}) == expected
        return
    mode = FakeTensorMode(shape_env=ShapeEnv() if kind == "symbolic" else None)
    # Meta kernels in C++, as of `pad`, refuse symbolic sizes without PyTorch's Python dispatcher.
    with mode, enable_python_dispatcher() if kind == "symbolic" else nullcontext():
        assert shapes_of(m, {n: mode.from_tensor(array) for n, array in x.items()}) == expected


@pytest.fixture
def reads(monkeypatch):
    """The lengths that are read, each of which would wait for the device."""
    found, tolist = [], torch.Tensor.tolist

    def read(tensor):
        found.append(tensor.shape)
        return tolist(tensor)

    monkeypatch.setattr(PyTorch, "is_far", lambda *_: True)
    monkeypatch.setattr(known_lengths, "_remembered", {})
    monkeypatch.setattr(torch.Tensor, "tolist", read)
    return found


def test_a_length_is_known_until_it_is_written_to_and_nothing_is_kept_of_the_past(reads):
    length = remembered(torch.full((2,), 7, dtype=torch.int32), 7)
    assert lengths_on_host(length) == [7, 7]
    assert not reads
    length[:1].add_(1)
    assert lengths_on_host(length) == [8, 7]
    assert lengths_on_host(length) == [8, 7]  # What was read is not remembered.
    assert len(reads) == 2
    length = remembered(torch.zeros(2, dtype=torch.int32), 0)
    assert lengths_on_host(length.clone()) == [0, 0]
    with torch.inference_mode():
        assert lengths_on_host(remembered(torch.zeros(2, dtype=torch.int32), 0)) == [0, 0]
    assert len(reads) == 4
    del length
    gc.collect()
    assert not known_lengths._remembered


def test_tokens_are_appended_without_reading_their_number():
    """Each sequence has its own length and count, and tokens beyond the capacity are dropped."""
    buffer = torch.arange(3 * 5 * 2.0).reshape(3, 5, 2)
    tokens = -1 - torch.arange(3 * 7 * 2.0).reshape(3, 7, 2)
    lengths, counts = torch.tensor([0, 2, 4]), torch.tensor([7, 5, 0])
    expected = buffer.clone()
    expected[0] = tokens[0, :5]
    expected[1, 2:] = tokens[1, :3]
    for donate in (False, True):
        given = buffer.clone()
        with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=False) as mode:
            fake = [mode.from_tensor(x) for x in (given, tokens, lengths, counts)]
            append(*fake, donate=donate)  # It would fail if it read an entry.
        result = append(given, tokens, lengths, counts, donate=donate)
        assert torch.equal(result, expected)
        assert (result is given) == donate


def test_generation_reads_no_length(reads, monkeypatch):
    monkeypatch.setattr(PyTorch, "reads_at_once", False)
    m, x = pa.GatedDelta(), inputs_of("gated_delta", "torch", t=1)
    cache = m.init_cache(**x)
    with torch.no_grad():
        for _ in range(3):
            _, cache = m.extend(cache, **x, donate=True)
    assert lengths_on_host(cache.length) == [3, 3]
    assert not reads
    assert cache.length.tolist() == [3, 3]

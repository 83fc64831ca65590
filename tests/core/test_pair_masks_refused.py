"""No mechanism ignores a mask of pairs: it has it, or says why not; bad masks are named."""

import re
from functools import partial

import numpy as np
import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn.dispatch.plan import query
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.core.test_pair_masks import PAIRS, PREFIX, QKV, B, H, T, agree, close

LAYOUT = CallLayout("masked", b=1, t=6, s=6)
COMPOSITIONS = ("lucid(laser)", "ccq(lucid)", "bidirectional(gated_delta)", "temperature(laser)")
TEXTS = sorted(
    {*pa.mechanisms(), *COMPOSITIONS}.union(*(c.variants for c in registry.registered().values()))
)
MASKS = {"prefix": np.array([6]), "attn_mask": np.eye(6, dtype=bool)[None, None]}
WHY = {
    "lucid": "triangular solve relates keys to earlier keys, in causal order",
    "gated_delta": "sums up all tokens before a query in a state, without single pairs",
    "path": "scores depend on the tokens between the two of a pair",
    "nystrom": "does not relate tokens by scores of queries and keys alone",
}


def changed(m, x, token):
    """The inputs with another token."""
    other = make_inputs(m, LAYOUT, "random", seed=1)
    for name, pattern in m.inputs.items():
        x = {**x, name: x[name].copy()}
        for axis, letter in enumerate(pattern.letters):
            if letter in "ts" and x[name].shape[axis] == LAYOUT.t:
                at = (*[slice(None)] * axis, token)
                x[name][at] = other[name][at]
    return x


def reason(m, x, name):
    """Why a mechanism takes no such mask; None where it does."""
    try:
        m(**x, **{name: MASKS[name]})
    except ValueError as error:
        why = str(error).removeprefix(f"{m} takes no {name}: ")
        assert len(why.split()) >= 6
        assert not re.search(r" takes no |\. |\n", why)
        return why
    return None


@pytest.mark.parametrize("text", TEXTS)
def test_a_mechanism_has_masks_of_pairs_or_says_in_one_sentence_why_not(text):
    m = pa.parse(text)
    x = make_inputs(m, LAYOUT, "random")
    relating = {leaf.name for leaf in m.program.leaves if leaf.relates_tokens}
    reasons = {name: reason(m, x, name) for name in MASKS}
    assert all(WHY.get(text, "") in (why or "") for why in reasons.values())
    if relating - {"softmax"}:
        assert all(reasons.values())
    if text in ("softmax", "laser", "differential", "qk_norm", "temperature", "row_normalized"):
        assert reasons["attn_mask"] is None
    if reasons["attn_mask"] is None:  # Each query may attend only to itself.
        own = MASKS["attn_mask"]
        out, other = (m(**inputs, attn_mask=own) for inputs in (x, changed(m, x, 3)))
        # A shift of LASER's exponents is of all tokens, and rounds.
        close(*(np.delete(a, 3, axis=1) for a in (out, other)), 1e-14)
        assert np.abs(out[:, 3] - other[:, 3]).max() > 1e-3
        # No query sees the first and the last key.
        mask = np.broadcast_to(np.arange(6) % 5 > 0, (1, 1, 6, 6))
        agree(m, x, {"attn_mask": mask}, "portable")
    if relating and reasons["prefix"] is None:  # The first token sees the last one.
        out, other = (m(**inputs, prefix=[6]) for inputs in (x, changed(m, x, 5)))
        assert np.abs(out[:, 0] - other[:, 0]).max() > 1e-3
        close(m(**x, prefix=[0]), m(**x), 1e-14)


def test_a_backend_that_does_not_know_them_is_not_asked():
    class Blind(pa.Backend):
        name, libraries, preference = "blind", frozenset({"numpy"}), 99

        def prepare(self, piece, request):
            raise AssertionError

    request = pa.Softmax().explain(*QKV, prefix=PREFIX).request
    assert query(Blind(), pa.Softmax(), request) == "has no masks of pairs: prefix"


def extended(m=pa.Softmax(), t=T, verb="extend", **masks):  # noqa: B008
    cache = m.init_cache(*QKV, capacity=200)
    return getattr(m, verb)(cache, *(a[:, :t] for a in QKV), **masks)


def packed(**masks):
    x = [a[:1] for a in QKV]
    cache = pa.Softmax().init_cache(*x, capacity=T, sequences=2)
    return pa.Softmax().extend(cache, *x, cu_seqlens=[0, 50, T], **masks)


def divided(at):
    """A prefix beyond the new tokens of an empty cache, or beyond those that are cached."""
    m, cache = pa.Softmax(), pa.Softmax().init_cache(*QKV, capacity=T)
    if at:
        _, cache = m.extend(cache, *(a[:, :50] for a in QKV))
    m.extend(cache, *(a[:, at : at + 50] for a in QKV), prefix=PREFIX)


WINDOW, LINEAR, FORGET = pa.Softmax(window=9), pa.Linear(), pa.Softmax(forget="scaled")
GIVEN = {"prefix": {"prefix": PREFIX}, "attn_mask": {"attn_mask": PAIRS}}
LAST_ONLY = "keeps the last tokens only, and no"
TWICE = r"within the new tokens of an empty cache, or within the cached ones \(sequence 1"
NUMBERS, SHAPE = "must have dtype bool; found", r"\(2 or 1, 4 or 1, 150, 150\); found"
REFUSED = [
    *(
        (lambda masks=masks: pa.softmax(*QKV, **masks), error, words)
        for masks, error, words in (
            ({"prefix": [1, -2]}, ValueError, r"prefix must not be negative \(sequence 1"),
            ({"prefix": [1]}, ValueError, r"prefix is declared \(b\), that is \(2,\); found"),
            ({"prefix": [1.5, 2]}, TypeError, "prefix must be whole numbers"),
            ({"attn_mask": PAIRS[0, 0]}, ValueError, rf"{SHAPE} \(150, 150\)"),
            ({"attn_mask": PAIRS[:, :3]}, ValueError, rf"{SHAPE} \(2, 3, 150, 150\)"),
            ({"attn_mask": PAIRS[:, :, :1]}, ValueError, rf"{SHAPE} \(2, 4, 1, 150\)"),
            ({"attn_mask": PAIRS * 1.0}, TypeError, f"{NUMBERS} float64"),
            ({"attn_mask": [[[[True]]]]}, TypeError, "array of numpy, as the inputs; found list"),
        )
    ),
    (
        lambda: FORGET(*QKV, g=np.zeros((B, T, H)), prefix=PREFIX),
        ValueError,
        "a forget gate decays forward in time",
    ),
    (lambda: divided(0), ValueError, TWICE),
    (lambda: divided(50), ValueError, TWICE),
    (lambda: extended(attn_mask=PAIRS[:, :3]), ValueError, "attn_mask .*found"),
    (lambda: pa.Softmax().vjp(*QKV, attn_mask=PAIRS * 1), TypeError, NUMBERS),
    (lambda: extended(WINDOW, prefix=PREFIX), ValueError, f"{LAST_ONLY} prefix"),
    (
        lambda: extended(WINDOW, attn_mask=PAIRS),
        ValueError,
        "last tokens only, and not all columns of an attn_mask",
    ),
    *(
        row
        for name, masks in GIVEN.items()
        for row in (
            (partial(packed, **masks), ValueError, f"sequences of extend take no {name}"),
            (partial(extended, LINEAR, keep=2, **masks), ValueError, f"takes no {name}: linear"),
            (
                partial(extended, LINEAR, verb="extend_vjp", **masks),
                TypeError,
                f"unknown keyword {name!r}",
            ),
        )
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_bad_masks_of_pairs_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


GIVEN_TO_ALL = {"prefix": np.array([1]), "attn_mask": np.ones((1, 1, 4, 4), bool)}
ONE_DEVICE = "is for calls on one device, which are not divided"
TOKENS_DIVIDED = "tokens are divided supports no"


def test_calls_of_several_processes_refuse_masks_of_pairs():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.distributed.tensor")  # PyTorch can be built without it.
    from torch.distributed.tensor import DTensor, Replicate

    from precondattn.layers.torch import Attention, divide_tokens
    from precondattn.parallel.torch import context_parallel

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        q, m, layer = torch.ones(1, 4, 2, 4), pa.Softmax(), Attention(8, heads=2)
        x = [DTensor.from_local(q, mesh, [Replicate()])] * 3
        of_processes, cache = context_parallel(m, mesh), m.init_cache(*x, capacity=4)
        _, divided = of_processes.prefill(q, q, q, capacity=8)
        divide_tokens(layer, mesh)
        for name, mask in GIVEN_TO_ALL.items():
            given = {name: torch.from_numpy(mask)}
            for call in (
                partial(m, *x),
                partial(m.vjp, *x),
                partial(m.extend, cache, *x),
                partial(of_processes, q, q, q),
                partial(of_processes.prefill, q, q, q, capacity=8),
                partial(of_processes.extend, divided, q, q, q),
            ):
                with pytest.raises(TypeError, match=f"softmax: {name} {ONE_DEVICE}"):
                    call(**given)
            with pytest.raises(ValueError, match=f"{TOKENS_DIVIDED} {name}"):
                layer(torch.ones(1, 4, 8), **given)
    finally:
        dist.destroy_process_group()


def test_calls_of_a_mesh_of_jax_refuse_masks_of_pairs():
    jax, nnx = pytest.importorskip("jax"), pytest.importorskip("flax.nnx")
    from precondattn.layers.flax import Attention, divide_tokens
    from precondattn.parallel.jax import context_parallel

    mesh = jax.make_mesh((1,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    q, layer = jax.numpy.ones((1, 4, 2, 4)), Attention(8, heads=2, rngs=nnx.Rngs(0))
    divide_tokens(layer, mesh, "cp")
    for name, mask in GIVEN_TO_ALL.items():
        given = {name: jax.numpy.asarray(mask)}
        with pytest.raises(TypeError, match=f"{name} {ONE_DEVICE}"):
            context_parallel("softmax", mesh, "cp")(q, q, q, **given)
        with pytest.raises(ValueError, match=f"{TOKENS_DIVIDED} {name}"):
            layer(jax.numpy.ones((1, 4, 8)), **given)

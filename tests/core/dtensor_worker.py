"""Two processes hold DTensors together, sharded over batch and heads, and nothing is sent.

A row is a mechanism, the axis that is sharded, and what is special. Output, gradients, `vjp`,
`extend` and its cache equal those of whole tensors.
"""

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.core.parallel_worker import named

WORLD = 2
PLAIN = CallLayout("test", t=5, s=5)
MECHANISMS = (
    *("softmax[bias=true]", "lucid(path)", "gsa", "ssd", "gated_delta", "retention"),
    *("differential", "row_normalized", "temperature[per=head](linear)", "hedgehog", "qk_norm"),
    *("elu1", "laser", "per_dim_scale", "ccq(gla)", "ccq(lucid)"),
)
"""Each kind of inputs, states and stored tokens"""


def axis_of(pattern, shape, what):
    letters = {"batch": "b", "heads": "nhu"}[what]
    return next((i for i, x in enumerate(pattern.letters) if x in letters and shape[i] > 1), None)


def distributed(array, axis, mesh, requires_grad=True):
    """A whole tensor as a DTensor, without communication."""
    rank = mesh.get_rank()
    local = array if axis is None else array.chunk(WORLD, axis)[rank].contiguous()
    placement = Replicate() if axis is None else Shard(axis)
    return (
        DTensor.from_local(local.clone(), mesh, [placement]).detach().requires_grad_(requires_grad)
    )


def require_equal(found, expected, mesh, what):
    torch.testing.assert_close(found.full_tensor(), expected, msg=lambda m: f"{what}: {m}")


def check(expression, what, mesh, mask=None, **changed):
    m, layout = pa.parse(expression), PLAIN._replace(**changed)
    x = {n: torch.tensor(a) for n, a in make_inputs(m, layout, "clustered").items()}
    masks = {n: torch.as_tensor(a) for n, a in layout._replace(mask=mask).masks().items()}
    axes = {n: axis_of(m.inputs[n], a.shape, what) for n, a in x.items()}
    wholes = {n: a.clone().requires_grad_() for n, a in x.items()}
    expected = m(**wholes, **masks)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    expected_gradients = torch.autograd.grad(expected, list(wholes.values()), cotangent)

    given = {n: distributed(a, axes[n], mesh) for n, a in x.items()}
    given_masks = {
        n: distributed(a, 0 if what == "batch" else None, mesh, requires_grad=False)
        for n, a in masks.items()
    }
    with CommDebugMode() as communicated:
        out = m(**given, **given_masks)
        d_out = distributed(cotangent, 0 if what == "batch" else 2, mesh)
        gradients = torch.autograd.grad(out, list(given.values()), d_out)
        _, pullback = m.vjp(**given, **given_masks)
        explicit = pullback(d_out.detach())
        if m.offers.causal and mask is None:
            extended = extend(m, given)
            whole_cache = m.init_cache(**x, capacity=layout.t)
            expected_extended, whole_cache = m.extend(whole_cache, **x)
    assert communicated.get_total_counts() == 0, communicated.get_comm_counts()
    require_equal(out, expected, mesh, "the output")
    for name, gradient, automatic in zip(x, expected_gradients, gradients, strict=True):
        is_sum = axes[name] is None
        assert isinstance(automatic.placements[0], Partial) == is_sum, name
        require_equal(automatic, gradient, mesh, f"the gradient of {name}")
        require_equal(explicit[name], gradient, mesh, f"the vjp of {name}")
    if m.offers.causal and mask is None:
        found, cache = extended
        require_equal(found, expected_extended, mesh, "the extended output")
        for name, buffer in cache.store.items():
            require_equal(buffer, whole_cache.store[name], mesh, f"the cache's {name}")


def with_cu_seqlens(mesh):
    layout = PLAIN._replace(b=1)
    m, bounds = pa.Lucid(), torch.tensor([0, 2, 5], dtype=torch.int32)
    x = {n: torch.tensor(a) for n, a in make_inputs(m, layout, "random").items()}
    given = {n: distributed(a, 2, mesh) for n, a in x.items()}
    for whole in (bounds, bounds.tolist(), DTensor.from_local(bounds, mesh, [Replicate()])):
        out = m(**given, cu_seqlens=whole)
        require_equal(out, m(**x, cu_seqlens=bounds), mesh, "the output")
    require_refused(("b = 1 is expected; found b = 2",), mesh, cu_seqlens=bounds)


def extend(m, x):
    cache = m.init_cache(**x, capacity=x["q"].shape[1])
    with torch.no_grad():
        return m.extend(cache, **x)


def require_refused(words, mesh, expression="lucid", **changed):
    m = pa.parse(expression)
    x = {n: torch.tensor(a) for n, a in make_inputs(m, PLAIN, "random").items()}
    given = {n: distributed(a, 0, mesh) for n, a in x.items()} | changed
    for call in (m, m.vjp, m.init_cache)[: 2 if "cu_seqlens" in changed else 3]:
        more = {"capacity": 5} if call == m.init_cache else {}
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**given, **more)
        assert all(word in str(raised.value) for word in words), str(raised.value)


def refusals(mesh):
    def sharded(shape, axis):
        return distributed(torch.ones(shape, dtype=torch.float64), axis, mesh)

    x = PLAIN
    keys, queries = (x.b, x.s, x.n, x.d), (x.b, x.t, x.h, x.d)
    time = {n: sharded((2, 6, *s), 1) for n, s in (("q", (4, 8)), ("k", (2, 8)), ("v", (2, 6)))}

    def uneven(shape):
        local = torch.ones(shape, dtype=torch.float64)[: 2 - mesh.get_rank()]
        of_all = torch.ones(3, *shape[1:])
        placed = {"shape": of_all.shape, "stride": of_all.stride()}
        return DTensor.from_local(local, mesh, [Shard(0)], **placed)

    of_heads = {"q": sharded(queries, 2), "k": sharded(keys, 2)}
    of_heads["v"] = sharded((x.b, x.s, x.n, x.e), 2)
    partial_sums = DTensor.from_local(torch.ones(keys).double(), mesh, [Partial()])
    placements = ("k must have the placements", "Shard(dim=0)", "Replicate()")
    for words, changed in (
        (("q", "axis 1 (t)", "query time"), time),
        (("k", "axis 3 (d)", "key width"), {"k": sharded(keys, 3)}),
        (("k must be a DTensor",), {"k": partial_sums.to_local()}),
        (placements, {"k": sharded(keys, None)}),
        (("divides the batch of q and the heads of k",), {"k": sharded(keys, 2)}),
        (("k is P", "Shard or Replicate expected"), {"k": partial_sums}),
        (("a multiple of 2 expected",), {"q": uneven(queries), "k": uneven(keys)}),
    ):
        require_refused(words, mesh, **changed)
    require_refused(("retention: heads can not be sharded",), mesh, "retention", **of_heads)
    q = distributed(torch.ones(2, 5, 2, 4), 0, mesh)
    with pytest.raises(TypeError, match="lengths must be a DTensor"):
        pa.softmax(q, q, q, lengths=torch.tensor([3, 5]))


def compiled_under_autocast(mesh):
    """Compiled, and under autocast, a call is that of its parts too."""
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 5, 2, 4)
    given = [distributed(a, 0, mesh) for a in whole]
    compiled = torch.compile(pa.Lucid(), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (compiled(*given), pa.lucid(*given)), pa.lucid(*whole)
    for out in found:
        require_equal(out, expected, mesh, "the output")
        gradients = torch.autograd.grad(out.float().sum(), given)
        assert all(g.dtype == torch.float32 and g.placements == (Shard(0),) for g in gradients)


def inside_context_parallel(mesh):
    """Only PyTorch's own attention is called there, and everything works again afterwards."""
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    parts = [q.clone(), k.clone(), v.clone()]
    m, state = pa.Lucid(), pa.Linear()
    cache, state_cache = m.init_cache(q, k, v, capacity=8), state.init_cache(q, k, v)
    calls = (
        lambda: m(*parts),
        lambda: pa.softmax(*parts, backend="reference"),
        lambda: pa.softmax(*parts, lengths=[4]),
        lambda: pa.softmax(*parts, window=2),
        lambda: pa.RMSNorm()(parts[0]),
        lambda: pa.Softmax().vjp(*parts),
        lambda: m.extend(cache, *parts),
        lambda: state.extend_vjp(state_cache, *parts),
    )
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1, 1, 1]):
        for call in calls:
            with pytest.raises(RuntimeError, match="inside PyTorch's context_parallel"):
                call()
        # PyTorch has the rule for its attention on GPUs only; the call reaches it.
        with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention_for_"):
            pa.softmax(*parts)
    assert m(q, k, v).shape == v.shape


def rows():
    for i, text in enumerate(MECHANISMS):
        both = "norm" in text or "ccq" in text or text == "retention"
        for what in ("batch", "heads") if both else (("heads", "batch")[i % 2],):
            if (text, what) != ("retention", "heads"):
                yield text, what, {"broadcast": "bh"} if "bias" in text else {}
    for text in ("lucid", "gla", "path"):
        yield text, "heads", {"n": 1}
    for i, mask in enumerate(("lengths", "key_mask", "segment_ids", "lengths")):
        yield "lucid", ("batch", "heads")[i % 2], {"mask": mask}


FEW = (
    *(("lucid(path)", "heads", {}), ("ccq(gla)", "batch", {})),
    *(("softmax[bias=true]", "heads", {"broadcast": "bh"}), ("lucid", "heads", {"n": 1})),
    *(("lucid", "batch", {"mask": "segment_ids"}), ("row_normalized", "heads", {})),
)


def cases(world):
    yield from named(rows(), check)
    yield "cu_seqlens, heads", with_cu_seqlens
    yield "compiled", compiled_under_autocast
    yield "refusals", refusals


def few(world):
    yield from named(FEW, check)
    yield "context parallel", inside_context_parallel

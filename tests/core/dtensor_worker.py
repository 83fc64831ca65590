"""Two processes hold DTensors together. `tests/ranks.py` starts them; each calls `main`.

A process writes `result_RANK.json`: the names of its cases, and the error of each that failed.
"""

import json
import traceback
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

WORLD = 2
PLAIN = CallLayout("test", t=5, s=5)
MECHANISMS = {
    "softmax": PLAIN,
    "softmax[bias=true]": PLAIN._replace(broadcast="bh"),
    "lucid": PLAIN,
    "laser": PLAIN,
    "path": PLAIN,
    "lucid(path)": PLAIN,
    "linear": PLAIN,
    "gla": PLAIN,
    "gsa": PLAIN,
    "ssd": PLAIN,
    "delta": PLAIN,
    "gated_delta": PLAIN,
    "retention": PLAIN,
    "differential": PLAIN,
    "row_normalized": PLAIN,
    "temperature": PLAIN,
    "temperature[per=head](linear)": PLAIN,
    "hedgehog": PLAIN,
    "elu1": PLAIN,
    "qk_norm": PLAIN,
    "per_dim_scale": PLAIN,
    "ccq(gla)": PLAIN,
    "ccq(lucid)": PLAIN,
}
ONE_KEY_HEAD = ("lucid", "gla", "path", "ccq(gla)")


def axis_of(pattern, shape, what):
    letters = {"batch": "b", "heads": "nhu"}[what]
    return next((i for i, x in enumerate(pattern.letters) if x in letters and shape[i] > 1), None)


def distributed(array, axis, mesh, **options):
    """A whole tensor as a DTensor, without communication."""
    rank = mesh.get_rank()
    local = array if axis is None else array.chunk(WORLD, axis)[rank].contiguous()
    placement = Replicate() if axis is None else Shard(axis)
    return DTensor.from_local(local.clone(), mesh, [placement]).detach().requires_grad_(**options)


def require_equal(found, expected, mesh, what):
    torch.testing.assert_close(found.full_tensor(), expected, msg=lambda m: f"{what}: {m}")


def check(expression, what, layout, mesh, mask=None):
    m = pa.parse(expression)
    x = {n: torch.tensor(a) for n, a in make_inputs(m, layout, "clustered").items()}
    masks = {n: torch.as_tensor(a) for n, a in layout._replace(mask=mask).masks().items()}
    axes = {n: axis_of(m.inputs[n], a.shape, what) for n, a in x.items()}
    wholes = {n: a.clone().requires_grad_() for n, a in x.items()}
    expected = m(**wholes, **masks)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    expected_gradients = torch.autograd.grad(expected, list(wholes.values()), cotangent)

    given = {n: distributed(a, axes[n], mesh) for n, a in x.items()}
    given_masks = {
        n: DTensor.from_local(
            a.chunk(WORLD)[mesh.get_rank()] if what == "batch" else a,
            mesh,
            [Shard(0) if what == "batch" else Replicate()],
        )
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
    def tensor(*shape):
        return torch.ones(shape, dtype=torch.float64)

    def sharded(shape, axis):
        return distributed(tensor(*shape), axis, mesh)

    x = PLAIN
    keys, queries = (x.b, x.s, x.n, x.d), (x.b, x.t, x.h, x.d)
    time = {
        "q": sharded((2, 6, 4, 8), 1),
        "k": sharded((2, 6, 2, 8), 1),
        "v": sharded((2, 6, 2, 6), 1),
    }
    return {
        "time": lambda: require_refused(("q", "axis 1 (t)", "query time"), mesh, **time),
        "channels": lambda: require_refused(
            ("k", "axis 3 (d)", "key width"), mesh, k=sharded(keys, 3)
        ),
        "a plain tensor": lambda: require_refused(("k must be a DTensor",), mesh, k=tensor(*keys)),
        "replicated beside sharded": lambda: require_refused(
            ("k must have the placements", "Shard(dim=0)", "Replicate()"),
            mesh,
            k=sharded(keys, None),
        ),
        "heads beside batch": lambda: require_refused(
            ("divides the batch of q and the heads of k",), mesh, k=sharded(keys, 2)
        ),
        "partial sums": lambda: require_refused(
            ("k is P", "Shard or Replicate expected"),
            mesh,
            k=DTensor.from_local(tensor(*keys), mesh, [Partial()]),
        ),
        "an odd batch": lambda: require_refused(
            ("a multiple of 2 expected",),
            mesh,
            q=DTensor.from_local(
                tensor(*queries)[: 2 - mesh.get_rank()],
                mesh,
                [Shard(0)],
                shape=(3, *queries[1:]),
                stride=tensor(3, *queries[1:]).stride(),
            ),
            k=DTensor.from_local(
                tensor(*keys)[: 2 - mesh.get_rank()],
                mesh,
                [Shard(0)],
                shape=(3, *keys[1:]),
                stride=tensor(3, *keys[1:]).stride(),
            ),
        ),
        "heads of retention": lambda: require_refused(
            ("retention: heads can not be sharded",),
            mesh,
            "retention",
            q=sharded(queries, 2),
            k=sharded(keys, 2),
            v=sharded((x.b, x.s, x.n, x.e), 2),
        ),
        "a plain mask": lambda: require_refused_mask(mesh),
    }


def require_refused_mask(mesh):
    q = distributed(torch.ones(2, 5, 2, 4), 0, mesh)
    for lengths in (torch.tensor([3, 5]), [3, 5]):
        with pytest.raises(TypeError, match="lengths must be a DTensor"):
            pa.softmax(q, q, q, lengths=lengths)


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
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1, 1, 1]):
        refused = {
            "call": lambda: m(*parts),
            "another backend": lambda: pa.softmax(*parts, backend="reference"),
            "a mask": lambda: pa.softmax(*parts, lengths=[4]),
            "a window": lambda: pa.softmax(*parts, window=2),
            "rows": lambda: pa.RMSNorm()(parts[0]),
            "vjp": lambda: pa.Softmax().vjp(*parts),
            "extend": lambda: m.extend(cache, *parts),
            "extend_vjp": lambda: state.extend_vjp(state_cache, *parts),
        }
        for call in refused.values():
            with pytest.raises(RuntimeError, match="inside PyTorch's context_parallel"):
                call()
        # PyTorch has the rule for its attention on GPUs only; the call reaches it.
        with pytest.raises(
            NotImplementedError, match="_scaled_dot_product_flash_attention_for_cpu"
        ):
            pa.softmax(*parts)
    assert m(q, k, v).shape == v.shape


def cases(mesh):
    for what in ("batch", "heads"):
        for expression, layout in MECHANISMS.items():
            if expression == "retention" and what == "heads":
                continue
            yield (
                f"{expression}, {what}",
                lambda e=expression, w=what, y=layout: check(e, w, y, mesh),
            )
    for expression in ONE_KEY_HEAD:
        layout = PLAIN._replace(n=1)
        yield (
            f"{expression}, one key head",
            lambda e=expression, y=layout: check(e, "heads", y, mesh),
        )
    for mask in ("lengths", "key_mask", "segment_ids"):
        for what in ("batch", "heads"):
            yield f"{mask}, {what}", lambda k=mask, w=what: check("lucid", w, PLAIN, mesh, k)
    yield "cu_seqlens, heads", lambda: with_cu_seqlens(mesh)
    yield "compiled", lambda: compiled_under_autocast(mesh)
    yield "context parallel", lambda: inside_context_parallel(mesh)
    yield from ((f"refused: {name}", case) for name, case in refusals(mesh).items())


def main(rank, world, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("devices",))
    results = {}
    for name, case in cases(mesh):
        try:
            case()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc(limit=-4)
    Path(folder, f"result_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()

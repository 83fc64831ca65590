"""Calls and steps of decoding, exported to ordinary operators, and run in onnxruntime."""

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

BATCH, TOKENS = torch.export.Dim("batch"), torch.export.Dim("tokens")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CAPACITY = 16

SIZES_OF_MASKS = {
    "lengths": {0: BATCH},
    "key_mask": {0: BATCH, 1: TOKENS},
    "segment_ids": {0: BATCH, 1: TOKENS},
    "attn_mask": {0: BATCH, 2: TOKENS, 3: TOKENS},
    "prefix": {0: BATCH},
}


class ExportedCall(torch.nn.Module):
    def __init__(self, m, **options):
        super().__init__()
        self.m, self.options = m, options

    def forward(self, x, masks):
        return self.m(**x, **masks, **self.options)


class StepModule(torch.nn.Module):
    """One step of decoding, whose cache is two arguments and two results."""

    def __init__(self, m, kinds):
        super().__init__()
        self.m, self.kinds = m, kinds

    def forward(self, length, store, x):
        out, cache = self.m.extend(pa.Cache(length, store, self.kinds), **x)
        return out, cache.length, cache.store


def tensors_of(m, b, t, seed=0):
    made = make_inputs(m, CallLayout("test", b=b, t=t, s=t), "clustered", seed)
    return {name: torch.tensor(a, dtype=torch.float32) for name, a in made.items()}


def masks_of(names, b, t):
    """Masks by name; every sequence has a token, and every query a key."""
    generator = torch.Generator().manual_seed(0)
    token, row = torch.arange(t), torch.arange(b)
    made = {
        "lengths": (t - 3 * row).clamp(min=1).int(),
        "key_mask": (torch.rand(b, t, generator=generator) < 0.7) | (token == 0),
        "segment_ids": (3 * token // t).int().expand(b, t).contiguous(),
        "attn_mask": (torch.rand(b, 1, t, t, generator=generator) < 0.7) | torch.eye(t).bool(),
        "prefix": (2 + row).clamp(max=t).int(),
    }
    return {name: made[name] for name in names}


def any_size(m):
    """The axes of a call's inputs that have any size."""
    sizes = {"b": BATCH, "t": TOKENS, "s": TOKENS}
    return {
        name: {i: sizes[a.letter] for i, a in enumerate(pattern.axes) if a.letter in sizes}
        for name, pattern in m.inputs.items()
    }


EMPTY = ((0, 6), (2, 0), (0, 0))
"""Numbers of sequences and of tokens, of which one is 0."""


def first_of(arrays, axes, b, t):
    """The first b sequences and t tokens of arrays with these axes."""
    sizes = {BATCH: b, TOKENS: t}
    return {
        name: a[tuple(slice(sizes.get(axes[name].get(i))) for i in range(a.ndim))]
        for name, a in arrays.items()
    }


def exported_call(m, *masks, **options):
    """A program of a call, for any batch and number of tokens."""
    given = tensors_of(m, 2, 6), masks_of(masks, 2, 6)
    sizes = {"x": any_size(m), "masks": {name: SIZES_OF_MASKS[name] for name in masks}}
    with pa.ordinary_operators():
        return torch.export.export(
            ExportedCall(m, **options), given, dynamic_shapes=sizes, strict=False
        )


def exported_step(m, cache, x):
    """A program of a step, for any batch."""
    store = {name: {0: BATCH} for name in cache.store}
    sizes = {"length": {0: BATCH}, "store": store, "x": _any_batch(m)}
    with pa.ordinary_operators():
        return torch.export.export(
            StepModule(m, cache.kinds), (cache.length, cache.store, x), dynamic_shapes=sizes
        )


def _any_batch(m):
    axes = {name: any_size(m)[name] for name in m.inputs.extending()}
    return {name: {i: d for i, d in of.items() if d is BATCH} for name, of in axes.items()}


def operators(program):
    """The operators of a program and of the bodies of its scans."""
    graphs = [g.graph for g in program.graph_module.modules() if hasattr(g, "graph")]
    return {str(n.target) for g in graphs for n in g.nodes if n.op == "call_function"}


def own_operators(program):
    """The operators of a program that only this package defines."""
    return [name for name in operators(program) if "precondattn" in name]


def prefilled(m, b=2):
    """A cache of six tokens."""
    cache = m.init_cache(**tensors_of(m, b, 6), capacity=CAPACITY)
    return m.extend(cache, **extension_of(m, b, 6))[1]


def extension_of(m, b, t=1, seed=0):
    """The inputs of an extension by t tokens."""
    sizes = {"b": b, "t": t, "c": CAPACITY}
    x = tensors_of(m, b, t, seed)
    for name, pattern in m.inputs.extending().items():
        if "c" in pattern.letters:
            shape = [
                sizes.get(a.letter, n) for a, n in zip(pattern.axes, x[name].shape, strict=True)
            ]
            x[name] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x


class InOnnxruntime:
    """An exported program that onnxruntime runs on a CPU."""

    def __init__(self, program):
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        self.model = torch.onnx.export(program, verbose=False).model_proto
        self.session = onnxruntime.InferenceSession(
            self.model.SerializeToString(), providers=["CPUExecutionProvider"]
        )

    def __call__(self, *arrays):
        names = [argument.name for argument in self.session.get_inputs()]
        given = {name: array.numpy() for name, array in zip(names, arrays, strict=True)}
        return [torch.from_numpy(out) for out in self.session.run(None, given)]

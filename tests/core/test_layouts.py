"""What an algorithm knows of positions and masks does not depend on who calls it."""

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
import precondattn.torch_operators
from precondattn.dispatch.discovery import REFERENCE
from precondattn.frame import EXTENSION, FULL, Layout, extending_frame, full_frame
from precondattn.frameworks.torch.frames import layout_of, text_of
from precondattn_conformance.inputs import CallLayout, make_inputs

B, T, HELD, CAPACITY = 2, 5, 3, 9
LENGTHS = torch.tensor([5, 3])
KEY_MASK = torch.tensor([[True, False, True, True, True]] * B)
FULL_MASKS = [
    {},
    {"lengths": LENGTHS},
    {"key_mask": KEY_MASK},
    {"lengths": LENGTHS, "key_mask": KEY_MASK},
    {"segment_ids": torch.tensor([[0, 0, 1, 1, 1]] * B)},
]


class RecordingRunner(pa.Runner):
    """Computes as the reference does, and keeps the layouts that its methods get."""

    def __init__(self, seen, reference):
        self.seen, self.reference = seen, reference

    def forward(self, inputs, frame):
        self.seen.add(("forward", frame.layout))
        return self.reference.forward(inputs, frame)[0], ()

    def backward(self, inputs, frame, out, residuals, cotangent):
        self.seen.add(("backward", frame.layout))
        out, residuals = self.reference.forward(inputs, frame)
        return self.reference.backward(inputs, frame, out, residuals, cotangent)

    def residual_shapes(self, inputs, frame):
        return ()

    def step(self, past, inputs, frame):
        self.seen.add(("step", frame.layout))
        return self.reference.step(past, inputs, frame)

    def step_backward(self, past, inputs, frame, cotangent, d_buffers):
        self.seen.add(("step_backward", frame.layout))
        return self.reference.step_backward(past, inputs, frame, cotangent, d_buffers)


class RecordingLayouts(pa.Backend):
    name = "recording"

    def __init__(self):
        self.seen = set()

    def prepare(self, piece, request):
        return RecordingRunner(self.seen, REFERENCE.prepare(piece, request))


@pytest.fixture
def recording(only_the_reference):
    backend = RecordingLayouts()
    pa.register_backend(backend)
    torch.compiler.reset()
    return backend


def tensors_of(m, t=T, *, requires_grad=False):
    made = make_inputs(m, CallLayout("test", b=B, t=t, s=t), "random")
    return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}


def stacked(x):
    return {name: torch.stack([a, 2 * a]) for name, a in x.items()}


def any_sizes(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)


def full(way, m, masks):
    """A full call, of which one way is to be mapped, compiled or differentiated."""
    x = tensors_of(m, requires_grad=way.startswith("gradient"))
    match way:
        case "plain":
            m(**x, **masks)
        case "vjp":
            out, pull = m.vjp(**x, **masks)
            pull(out)
        case "mapped":
            torch.func.vmap(lambda x: m(**x, **masks))(stacked(x))
        case "gradient":
            m(**x, **masks).sum().backward()
        case "gradients of several cotangents":
            out = m(**x, **masks)
            ones = torch.ones(3, *out.shape, dtype=out.dtype)
            torch.autograd.grad(out, list(x.values()), ones, is_grads_batched=True)
        case "gradient, compiled":
            compiled(m)(**x, **masks).sum().backward()
        case "gradient, compiled for any sizes":
            any_sizes(m)(**x, **masks).sum().backward()


WAYS = {
    "plain": FULL_MASKS,
    "vjp": FULL_MASKS[:2],
    "mapped": FULL_MASKS[1:3],
    "gradient": FULL_MASKS[2:],
    "gradients of several cotangents": FULL_MASKS[1:3],
    "gradient, compiled": FULL_MASKS[:1],
    "gradient, compiled for any sizes": FULL_MASKS[1:2],
}
CALLS = [(way, masks) for way, every in WAYS.items() for masks in every]


@pytest.mark.parametrize(("way", "masks"), CALLS)
def test_an_algorithm_sees_one_layout_in_every_full_call(way, masks, recording):
    full(way, pa.Delta(), masks)
    layout = Layout(FULL, T, T, frozenset(masks))
    verbs = ("forward",) if way in ("plain", "mapped") else ("forward", "backward")
    assert recording.seen == {(verb, layout) for verb in verbs}


def extension(way, m, masks, lengths):
    """An extension of caches that hold so many tokens."""
    x = tensors_of(m, HELD)
    cache = m.init_cache(**x, capacity=CAPACITY)
    _, cache = m.extend(cache, **x, lengths=lengths, backend="reference")
    x = tensors_of(m, requires_grad=way == "gradient")
    match way:
        case "plain":
            m.extend(cache, **x, **masks)
        case "donated":
            m.extend(cache, **x, **masks, donate=True)
        case "vjp":
            out, _, pull = m.extend_vjp(cache, **x, **masks)
            pull(out)
        case "mapped":
            with torch.no_grad():
                torch.func.vmap(lambda x: m.extend(cache, **x, **masks)[0])(stacked(x))
        case "gradient":
            m.extend(cache, **x, **masks)[0].sum().backward()
        case "compiled for any sizes":
            any_sizes(lambda cache, x: m.extend(cache, **x, **masks)[0])(cache, x)


@pytest.mark.parametrize(
    ("masks", "lengths"), [({}, None), ({}, [3, 1]), ({"lengths": LENGTHS}, None)]
)
@pytest.mark.parametrize(
    ("expression", "way"),
    [
        *(("delta", way) for way in ("plain", "donated", "vjp", "mapped", "gradient")),
        *(("softmax", way) for way in ("donated", "mapped", "compiled for any sizes")),
    ],
)
def test_an_algorithm_sees_one_layout_in_every_extension(
    expression, way, masks, lengths, recording
):
    m = pa.parse(expression)
    extension(way, m, masks, lengths)
    slots = CAPACITY if expression == "softmax" else 0
    held = HELD if lengths is None and not masks else None
    layout = Layout(EXTENSION, T, slots, frozenset(masks), held, HELD)
    verbs = ("step", "step_backward") if way in ("vjp", "gradient") else ("step",)
    assert recording.seen == {(verb, layout) for verb in verbs}


def test_the_text_of_a_layout_is_read_as_that_layout():
    for layout in (
        Layout(),
        Layout(FULL, 5, 7),
        Layout(FULL, None, None, frozenset({"lengths", "key_mask"})),
        Layout(EXTENSION, 1, 0, held=0, longest=0),
    ):
        assert layout_of(text_of(layout)) == layout
        assert bool(text_of(layout)) == bool(layout.kind)


def test_no_array_is_computed_before_it_is_read():
    frames = [
        full_frame(4, 6, torch.zeros(1)),
        extending_frame(torch.tensor([2, 5]), 8, 3, longest=5, past_mask=torch.ones(2, 8) > 0),
    ]
    for frame in frames:
        assert not {"q_position", "k_position"} & set(vars(frame))
        assert frame.k_position.shape[1] == len(frame.visible(causal=True)[0, 0, 0])
        assert {"q_position", "k_position"} <= set(vars(frame))


def test_a_replaced_array_leaves_nothing_known():
    frame = full_frame(6, 6, torch.zeros(1), lengths=torch.tensor([6, 2]))
    assert frame.layout.has_lengths_only
    assert frame.replaced(k_segment=None) is frame
    assert frame.replaced(k_valid=None).layout == Layout()

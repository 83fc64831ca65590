"""What an algorithm knows of positions and masks does not depend on who calls it."""

from functools import partial

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
import precondattn.torch_operators
from precondattn.frame import EXTENSION, FULL, Layout, extending_frame, full_frame
from precondattn.frameworks.torch.operators import layout_of, text_of
from precondattn.runner import LeafRunner
from tests.core.inputs import inputs_of

T, HELD, CAPACITY = 5, 3, 9
LENGTHS = {"lengths": torch.tensor([5, 3])}
KEY_MASK = {"key_mask": torch.tensor([[True, False, True, True, True]] * 2)}
SEGMENTS = {"segment_ids": torch.tensor([[0, 0, 1, 1, 1]] * 2)}
SEEN = set()
"""The methods that a call runs, each with the layout that it gets."""


def recording(name, place):
    def method(self, *arguments):
        SEEN.add((name, arguments[place].layout))
        return getattr(LeafRunner, name)(self, *arguments)

    return method


PLACES = {"forward": 1, "backward": 1, "step": 2, "step_backward": 2}
METHODS = {name: recording(name, place) for name, place in PLACES.items()}
RecordingRunner = type("RecordingRunner", (LeafRunner,), METHODS)


class RecordingLayouts(pa.Backend):
    name = "recording"

    def prepare(self, piece, request):
        return RecordingRunner(piece, piece)


@pytest.fixture(autouse=True)
def recorded(only_the_reference):
    pa.register_backend(RecordingLayouts())
    torch.compiler.reset()
    SEEN.clear()


tensors_of = partial(inputs_of, library="torch", t=T)
compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")


def stacked(x):
    return {name: torch.stack([a, 2 * a]) for name, a in x.items()}


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
            inputs = list(x.values())
            torch.vmap(lambda w: torch.autograd.grad(out, inputs, w, retain_graph=True))(ones)
        case "gradient, compiled for any sizes":
            compiled(m, dynamic=True)(**x, **masks).sum().backward()


@pytest.mark.parametrize(
    ("way", "masks"),
    [
        *(("plain", masks) for masks in ({}, LENGTHS, LENGTHS | KEY_MASK, SEGMENTS)),
        *(("vjp", LENGTHS), ("mapped", LENGTHS), ("mapped", KEY_MASK)),
        *(("gradient", LENGTHS | KEY_MASK), ("gradient", SEGMENTS)),
        ("gradients of several cotangents", KEY_MASK),
        pytest.param("gradient, compiled for any sizes", LENGTHS, marks=pytest.mark.thorough),
    ],
)
def test_an_algorithm_sees_one_layout_in_every_full_call(way, masks):
    full(way, pa.Delta(), masks)
    layout = Layout(FULL, T, T, frozenset(masks))
    verbs = ("forward",) if way in ("plain", "mapped") else ("forward", "backward")
    assert {(verb, layout) for verb in verbs} == SEEN


def extension(way, m, masks, lengths):
    """An extension of caches that hold so many tokens."""
    x = tensors_of(m, t=HELD)
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
            compiled(lambda cache, x: m.extend(cache, **x, **masks)[0], dynamic=True)(cache, x)


@pytest.mark.parametrize(
    ("expression", "way", "masks", "lengths"),
    [
        *(("delta", "plain", {}, None), ("delta", "donated", {}, [3, 1])),
        *(("delta", "vjp", LENGTHS, None), ("delta", "mapped", {}, [3, 1])),
        *(("delta", "gradient", {}, None), ("delta", "gradient", LENGTHS, None)),
        *(("softmax", "donated", {}, [3, 1]), ("softmax", "mapped", LENGTHS, None)),
        ("softmax", "compiled for any sizes", LENGTHS, None),
        pytest.param("softmax", "compiled for any sizes", {}, None, marks=pytest.mark.thorough),
    ],
)
def test_an_algorithm_sees_one_layout_in_every_extension(expression, way, masks, lengths):
    extension(way, pa.parse(expression), masks, lengths)
    slots = CAPACITY if expression == "softmax" else 0
    held = HELD if lengths is None and not masks else None
    layout = Layout(EXTENSION, T, slots, frozenset(masks), held, HELD)
    verbs = ("step", "step_backward") if way in ("vjp", "gradient") else ("step",)
    assert {(verb, layout) for verb in verbs} == SEEN


def test_the_text_of_a_layout_is_read_as_that_layout():
    for layout in (
        Layout(),
        Layout(FULL, 5, 7),
        Layout(FULL, None, None, frozenset({"lengths", "key_mask"})),
        Layout(EXTENSION, 1, 0, held=0, longest=0),
    ):
        assert layout_of(text_of(layout)) == layout
        assert bool(text_of(layout)) == bool(layout.kind)


def test_arrays_are_computed_when_they_are_read_and_a_replaced_one_leaves_nothing_known():
    frame = extending_frame(torch.tensor([2, 5]), 8, 3, longest=5, past_mask=torch.ones(2, 8) > 0)
    for each in (full_frame(4, 6, torch.zeros(1)), frame):
        assert not {"q_position", "k_position"} & set(vars(each))
        assert each.k_position.shape[1] == len(each.visible(causal=True)[0, 0, 0])
        assert {"q_position", "k_position"} <= set(vars(each))
    frame = full_frame(6, 6, torch.zeros(1), lengths=torch.tensor([6, 2]))
    assert frame.layout.has_lengths_only
    assert frame.replaced(k_segment=None) is frame
    assert frame.replaced(k_valid=None).layout == Layout()

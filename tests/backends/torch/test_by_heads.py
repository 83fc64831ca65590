"""Heads that are divided among threads give what one thread gives.

Inputs have few tokens, so that calls are divided only where a test asks for it. The number of
threads is 3: of 4 heads, two threads have 2 each; of 6, three have 2 each.
"""

import threading

import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs
from precondattn_torch import by_heads

DIVIDED = [
    ("lucid", 4, 4),
    ("lucid[beta=true]", 6, 3),
    ("laser(softmax[bias=true])", 4, 2),
    ("softmax[window=5]", 4, 1),
    ("softmax[forget=unscaled]", 6, 3),
    ("path", 4, 2),
    ("gated_delta", 4, 2),
    ("gdn2", 4, 2),
    ("ccq(gated_delta)", 4, 4),
    ("delta_product", 4, 2),
    ("mesa", 4, 2),
    ("atk", 4, 2),
    ("gsa", 4, 2),
    ("deltaformer", 6, 3),
    ("lucid(softmax[causal=false])", 4, 2),
    ("cross_covariance", 4, 4),
    ("outlook[stride=2,grid=5]", 4, 2),
]
"""Expressions, query heads and key/value heads."""

WHOLE = [
    ("mesa(retention)", 4, 4),  # The decay of a head depends on its number.
    ("lucid", 1, 1),
]


def inputs(expression, h, n, t=19):
    mechanism = pa.parse(expression)
    layout = CallLayout("heads", b=2, t=t, s=t, h=h, n=n)
    drawn = make_inputs(mechanism, layout, "clustered")
    return mechanism, {name: torch.tensor(array) for name, array in drawn.items()}


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def counted(monkeypatch, three_threads):
    """The parts of each call, of any size."""
    counts, run = [], by_heads.in_threads
    monkeypatch.setattr(by_heads, "LEAST", 1)

    def counting(function, count):
        counts.append(count)
        return run(function, count)

    monkeypatch.setattr(by_heads, "in_threads", counting)
    return counts


@pytest.mark.usefixtures("three_threads")
def test_each_thread_computes_alone():
    """PyTorch gives a new thread the process's number of threads at its first query."""
    by_heads._threads.cache_clear()
    assert by_heads.in_threads(lambda part: torch.get_num_threads(), 3) == [1, 1, 1]
    assert torch.get_num_threads() == 3


def call(mechanism, x, cotangent=None):
    """The output and all gradients."""
    leaves = {name: array.clone().requires_grad_() for name, array in x.items()}
    out = mechanism(**leaves, backend="torch")
    cotangent = torch.ones_like(out) if cotangent is None else cotangent
    return out.detach(), torch.autograd.grad(out, list(leaves.values()), cotangent)


@pytest.mark.parametrize(("expression", "h", "n"), DIVIDED)
def test_output_and_gradients_are_those_of_one_thread(expression, h, n, counted):
    mechanism, x = inputs(expression, h, n)
    out, gradients = call(mechanism, x)
    assert set(counted) == {3 if h == 6 else 2}
    torch.set_num_threads(1)
    counted.clear()
    expected, expected_gradients = call(mechanism, x)
    assert not counted
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for gradient, one in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("expression", ["atk(gated_delta)", "atk[learned=true](kda)"])
def test_a_group_of_leaves_is_divided_as_one(expression, counted):
    mechanism, x = inputs(expression, 4, 4, t=150)
    with torch.no_grad():
        out = mechanism(**x, backend="torch")
        assert counted == [2]
        torch.set_num_threads(1)
        expected = mechanism(**x, backend="torch")
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("expression", "h", "n"), WHOLE)
def test_heads_that_can_not_be_divided_are_computed_as_one(expression, h, n, counted):
    call(*inputs(expression, h, n))
    assert not counted


def test_a_small_call_is_not_divided(three_threads, monkeypatch):
    monkeypatch.setattr(by_heads, "in_threads", None)
    call(*inputs("lucid", 4, 4))


def test_threads_do_not_have_large_arrays_of_several_heads(counted, monkeypatch):
    """The gradient of PaTH is not divided among threads; other gradients have no such arrays."""
    monkeypatch.setattr(by_heads, "MOST", 19 * 18)
    call(*inputs("path", 4, 2))
    assert counted == [2]
    call(*inputs("softmax[window=5]", 4, 2))
    assert counted == [2] * 3


def test_masks_and_segments_are_passed_to_every_part(counted):
    mechanism, x = inputs("lucid", 4, 2)
    masks = {"lengths": torch.tensor([7, 19]), "key_mask": torch.rand(2, 19) < 0.8}
    out = mechanism(**x, **masks, backend="torch")
    assert counted
    torch.set_num_threads(1)
    torch.testing.assert_close(out, mechanism(**x, **masks, backend="torch"))


def test_the_inference_mode_reaches_the_threads(counted):
    mechanism, x = inputs("gated_delta", 4, 4)
    with torch.inference_mode():
        out = mechanism(**{name: array.clone() for name, array in x.items()}, backend="torch")
    assert counted
    assert out.is_inference()


def test_calls_of_several_threads_at_once(counted):
    mechanism, x = inputs("lucid", 4, 4)
    expected = mechanism(**x, backend="torch")
    outs = [None] * 6

    def run(i):
        torch.set_num_threads(3)
        outs[i] = mechanism(**x, backend="torch")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outs:
        torch.testing.assert_close(out, expected)


def test_an_error_of_a_part_is_raised(counted):
    _, x = inputs("mesa", 4, 4)
    impatient = pa.Mesa(iterations=1)
    with pytest.raises(pa.NotSolvedError, match="after 1 iterations"):
        impatient(**x, backend="torch")
    assert counted


def test_threads_leave_the_number_of_threads_as_it_is(counted):
    call(*inputs("lucid", 4, 4))
    assert torch.get_num_threads() == 3


def test_a_transformed_call_is_not_divided(counted):
    mechanism, x = inputs("gated_delta", 4, 4)
    torch.func.grad(lambda q: mechanism(q, **{n: x[n] for n in x if n != "q"}).sum())(x["q"])
    assert not counted

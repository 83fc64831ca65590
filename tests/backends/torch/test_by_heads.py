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
    ("lucid[beta=true]", 6, 3),
    ("laser(softmax[bias=true])", 4, 2),
    ("softmax[window=5]", 4, 1),
    ("softmax[forget=unscaled]", 6, 3),
    ("path", 4, 2),
    ("ccq(gated_delta)", 4, 4),
    ("delta_product", 4, 2),
    ("mesa", 4, 2),
    ("atk", 4, 2),
    ("gsa", 4, 2),
    ("deltaformer", 6, 3),
    ("cross_covariance", 4, 4),
    ("outlook[stride=2,grid=5]", 4, 2),
]
"""Expressions, query heads and key/value heads."""


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
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    counted.clear()
    expected, expected_gradients = call(mechanism, x)
    assert not counted
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for gradient, one in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("expression", ["lucid", "atk[learned=true](kda)"])
def test_masks_and_groups_of_leaves_are_divided_in_inference_mode(expression, counted):
    mechanism, x = inputs(expression, 4, 4, t=150)
    masks = {"lengths": torch.tensor([70, 150]), "key_mask": torch.rand(2, 150) < 0.8}
    masks = masks if expression == "lucid" else {}
    expected = mechanism(**x, **masks, backend="reference")
    with torch.inference_mode():
        x = {name: array.clone() for name, array in x.items()}
        out = mechanism(**x, **masks, backend="torch")
    assert counted
    assert out.is_inference()
    torch.testing.assert_close(out.clone(), expected, rtol=1e-10, atol=1e-10)


def test_numbered_heads_one_head_and_transformed_calls_are_not_divided(counted):
    call(*inputs("mesa(retention)", 4, 4))  # The decay of a head depends on its number.
    call(*inputs("lucid", 1, 1))
    mechanism, x = inputs("gated_delta", 4, 4)
    torch.func.grad(lambda q: mechanism(q, **{n: x[n] for n in x if n != "q"}).sum())(x["q"])
    assert not counted


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

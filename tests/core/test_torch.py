"""PyTorch: the reference is plain differentiable code; other backends are custom operators."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.frame import full_frame
from precondattn.frameworks.torch.autograd import operators
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("test", t=6, s=6)


def tensors_of(expression, *, requires_grad=True, kind="clustered", layout=LAYOUT):
    made = make_inputs(pa.parse(expression), layout, kind)
    return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}


def gradients(function, x, cotangent):
    return torch.autograd.grad(function(**x), list(x.values()), cotangent)


# Slow: options, which other tests run uncompiled; each mechanism is compiled by default.
@pytest.mark.thorough(but=("atk(gdn2)", "dplr"))
@pytest.mark.parametrize(
    "expression",
    [
        pytest.param(expression, marks=pytest.mark.slow) if "[" in expression else expression
        for expression in sorted({*expressions()} - derived())
    ],
)
def test_a_call_compiles_into_one_graph_with_its_gradient(expression):
    torch.compiler.reset()
    m, x = pa.parse(expression), tensors_of(expression)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    expected = m(**x)
    torch.testing.assert_close(compiled(**x), expected)
    cotangent = torch.ones_like(expected)
    for result, wanted in zip(
        gradients(compiled, x, cotangent), gradients(m, x, cotangent), strict=True
    ):
        torch.testing.assert_close(result, wanted)


def test_a_compiled_call_takes_masks_and_another_length():
    torch.compiler.reset()
    compiled = torch.compile(pa.Lucid(), fullgraph=True, backend="aot_eager")
    for t in (6, 9, 11):
        x = tensors_of("lucid", layout=CallLayout("test", t=t, s=t))
        lengths = torch.tensor([t - 2, t])
        torch.testing.assert_close(compiled(**x, lengths=lengths), pa.Lucid()(**x, lengths=lengths))


def test_a_compiled_call_with_a_bad_length_gives_nan_for_that_sequence():
    torch.compiler.reset()
    x = tensors_of("softmax")
    compiled = torch.compile(pa.Softmax(), fullgraph=True, backend="aot_eager")
    out = compiled(**x, lengths=torch.tensor([7, 6]))
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], pa.Softmax()(**x)[1])


@pytest.mark.thorough
def test_extend_compiles_into_one_graph():
    torch.compiler.reset()
    m, x = pa.Lucid(), tensors_of("lucid", requires_grad=False)
    cache = m.init_cache(**x, capacity=8)
    compiled = torch.compile(
        lambda cache, donate, *x: m.extend(cache, *x, donate=donate),
        fullgraph=True,
        backend="aot_eager",
    )
    out, kept = compiled(cache, False, *(x[name][:, :4] for name in "qkv"))
    more, cache = compiled(kept, True, *(x[name][:, 4:] for name in "qkv"))
    assert not kept.store
    torch.testing.assert_close(torch.cat([out, more], dim=1), m(**x))
    assert cache.length.tolist() == [6, 6]


def test_a_shorthand_compiles_into_one_graph_with_its_options_and_masks():
    torch.compiler.reset()
    x = tensors_of("lucid")
    lengths = torch.tensor([3, 6])

    def shorthand(q, k, v, lengths):
        return pa.lucid(q, k, v, eps=0.0, lengths=lengths)

    compiled = torch.compile(shorthand, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(**x, lengths=lengths), pa.Lucid(eps=0)(**x, lengths=lengths)
    )


@pytest.mark.thorough
def test_a_call_compiles_with_the_default_compiler():
    torch.compiler.reset()
    x = tensors_of("lucid")
    torch.testing.assert_close(torch.compile(pa.Lucid(), fullgraph=True)(**x), pa.Lucid()(**x))


@pytest.mark.parametrize("expression", ["softmax", "lucid", "laser", "lucid(laser)"])
def test_the_reference_has_higher_derivatives_forward_mode_and_vmap(expression):
    m, x = pa.parse(expression), tensors_of(expression, layout=CallLayout("test", b=1, t=3, s=3))
    torch.autograd.gradgradcheck(lambda q, k, v: m(q, k, v, backend="reference"), tuple(x.values()))
    tangents = tuple(torch.ones_like(a) for a in x.values())
    out, moved = torch.func.jvp(lambda q, k, v: m(q, k, v), tuple(x.values()), tangents)
    pairing = torch.sum(moved * out).detach()
    pulled = gradients(m, x, out.detach())
    torch.testing.assert_close(sum(g.sum() for g in pulled), pairing)
    stack = torch.stack([x["q"], 2 * x["q"]])
    mapped = torch.func.vmap(lambda q: m(q, x["k"], x["v"]))(stack)
    torch.testing.assert_close(mapped[1], m(2 * x["q"], x["k"], x["v"]))


class TestAnotherBackendInPytorch:
    """The out-of-tree backend claims lucid_solve."""

    def test_gradcheck(self, third_party):
        x = tensors_of("lucid", layout=CallLayout("test", b=1, t=4, s=4))
        assert torch.autograd.gradcheck(pa.Lucid(), tuple(x.values()))
        assert "backward of lucid_solve" in third_party.calls

    @pytest.mark.parametrize("masks", [{}, {"lengths": [4, 6]}])
    def test_autograd_equals_the_reference(self, third_party, masks):
        m, x = pa.Lucid(pa.Laser()), tensors_of("lucid(laser)")
        cotangent = torch.ones_like(m(**x))
        result = gradients(lambda **x: m(**x, **masks), x, cotangent)
        wanted = gradients(lambda **x: m(**x, **masks, backend="reference"), x, cotangent)
        for a, b in zip(result, wanted, strict=True):
            torch.testing.assert_close(a, b)

    # PyTorch's own check reads `grad` of what is no leaf.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    def test_opcheck(self, third_party):
        x = tensors_of("lucid_solve")
        k, v = x["k"], x["v"]
        frame = list(full_frame(6, 6, k, lengths=torch.tensor([4, 6])).arrays)
        torch.library.opcheck(operators.forward, ("lucid_solve", "third_party", [k, v], frame))
        k, v = k.detach(), v.detach()
        torch.library.opcheck(operators.inference, ("lucid_solve", "third_party", [k, v], frame))
        outputs = operators.forward("lucid_solve", "third_party", [k, v], frame)
        args = ("lucid_solve", "third_party", [k, v], frame, outputs, torch.ones_like(v))
        torch.library.opcheck(operators.backward, args)

    def test_compile_keeps_the_operator_as_one_node(self, third_party):
        torch.compiler.reset()
        x = tensors_of("lucid")
        compiled = torch.compile(pa.Lucid(), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**x), pa.Lucid()(**x, backend="reference"))
        result = gradients(compiled, x, torch.ones(2, 6, 4, 6, dtype=torch.float64))
        wanted = gradients(pa.Lucid(), x, torch.ones(2, 6, 4, 6, dtype=torch.float64))
        for a, b in zip(result, wanted, strict=True):
            torch.testing.assert_close(a, b)

    def test_vmap_folds_into_the_batch(self, third_party):
        x = tensors_of("lucid", requires_grad=False)
        stack = torch.stack([x["k"], 2 * x["k"], x["k"] + 1])
        m = pa.Lucid(pa.Laser())
        mapped = torch.func.vmap(lambda k: m(x["q"], k, x["v"]), in_dims=0)(stack)
        for i in range(3):
            torch.testing.assert_close(mapped[i], m(x["q"], stack[i], x["v"]))
        assert "lucid_solve" in third_party.calls

    def test_the_gradient_of_a_mapped_call(self, third_party):
        x = tensors_of("lucid", requires_grad=False)
        stack = torch.stack([x["k"], x["k"] + 1]).requires_grad_()
        m = pa.Lucid(pa.Laser())
        torch.func.vmap(lambda k: m(x["q"], k, x["v"]))(stack).sum().backward()
        for i in range(2):
            k = stack[i].detach().requires_grad_()
            (expected,) = torch.autograd.grad(m(x["q"], k, x["v"]).sum(), k)
            torch.testing.assert_close(stack.grad[i], expected)

    def test_function_transforms_of_the_gradient_are_left_to_the_reference(self, third_party):
        """PyTorch's custom operators have no torch.func.grad; the reference has."""
        x = tensors_of("lucid", requires_grad=False)

        def loss(k, backend=None):
            return pa.Lucid()(x["q"], k, x["v"], backend=backend).sum()

        result = torch.func.grad(loss)(x["k"])
        assert not third_party.calls
        torch.testing.assert_close(result, torch.func.grad(loss)(x["k"], "reference"))
        with pytest.raises(pa.UnsupportedError, match="third_party"):
            torch.func.grad(loss)(x["k"], "third_party")

    @pytest.mark.thorough
    def test_second_derivatives(self, third_party):
        x = tensors_of("lucid", layout=CallLayout("test", b=1, t=3, s=3))
        assert torch.autograd.gradgradcheck(pa.Lucid(), tuple(x.values()))
        assert "backward of lucid_solve" in third_party.calls

    def test_an_extension_with_a_gradient_is_left_to_the_reference(self, third_party):
        m, x = pa.Lucid(), tensors_of("lucid")
        out, _ = m.extend(m.init_cache(**x, capacity=6), **x)
        (dv,) = torch.autograd.grad(out.sum(), x["v"])
        (expected,) = torch.autograd.grad(m(**x, backend="reference").sum(), x["v"])
        torch.testing.assert_close(dv, expected)


def test_an_inference_call_records_nothing():
    x = tensors_of("lucid", requires_grad=False)
    assert not pa.Lucid()(**x).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_returned_in_the_input_dtype(dtype):
    x = {n: a.detach().to(dtype).requires_grad_() for n, a in tensors_of("lucid").items()}
    wide = {n: a.detach().float() for n, a in x.items()}
    # The blocked backend also rounds what one piece passes to the next.
    for backend, rounding in (("reference", 0), ("torch", 2 * torch.finfo(dtype).eps)):
        out = pa.Lucid()(**x, backend=backend)
        gradients = torch.autograd.grad(out.sum(), list(x.values()))
        assert {out.dtype, *(g.dtype for g in gradients)} == {dtype}
        expected = pa.Lucid()(**wide, backend=backend).to(dtype)
        torch.testing.assert_close(out, expected, rtol=rounding, atol=rounding)


def test_gates_of_half_precision_calls_may_be_float32():
    x = {n: a.detach().bfloat16() for n, a in tensors_of("lucid").items()}
    beta = torch.rand(2, 6, 2)
    out = pa.Lucid(beta=True)(**x, lucid_beta=beta)
    assert out.dtype == torch.bfloat16
    assert np.isfinite(out.float().numpy()).all()


class SubtractionRunner(pa.Runner):
    """o₁ − λ o₂ by a backend that PyTorch's autograd can not differentiate."""

    def forward(self, inputs, frame):
        return inputs["o1"] - inputs["lam"] * inputs["o2"], ()


class Subtraction(pa.Backend):
    name = "subtraction"
    preference = 10

    def prepare(self, piece, request):
        is_full = piece == pa.Difference() and request.verb != "extend"
        return SubtractionRunner() if is_full else "does o1 - lam o2"


def test_vmap_of_a_backend_whose_piece_reads_a_single_number(only_the_reference):
    pa.register_backend(Subtraction())
    m = pa.Differential()
    x = tensors_of("differential", requires_grad=False)
    stack = torch.stack([x["q"], -x["q"]])
    others = {name: tensor for name, tensor in x.items() if name != "q"}
    assert "subtraction" in m.explain(**x).backends
    mapped = torch.func.vmap(lambda q: m(q=q, **others))(stack)
    torch.testing.assert_close(mapped[1], m(**x | {"q": -x["q"]}))


def of_three_calls(**shapes):
    rng = np.random.default_rng(0)
    return {n: torch.from_numpy(rng.normal(size=(3, *shape))) for n, shape in shapes.items()}


ROWS = dict.fromkeys("qkv", (2, 9, 2, 4))


@pytest.mark.parametrize(
    ("expression", "inputs"),
    [
        ("cross_covariance", of_three_calls(**ROWS, logit_scale=(2,))),
        ("nystrom[landmarks=3,start=batch]", of_three_calls(**ROWS)),
    ],
)
def test_vmap_of_calls_that_are_no_longer_batch_makes_one_after_another(expression, inputs):
    """The cases are a mapped weight, and sequences of a batch that depend on each other."""
    m = pa.parse(expression)
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    mapped = torch.func.vmap(lambda x: m(**x, backend="torch"))(inputs)
    single = [m(**{n: a[i] for n, a in inputs.items()}, backend="torch") for i in range(3)]
    torch.testing.assert_close(mapped, torch.stack(single))
    inference = torch.func.vmap(lambda x: m(**x, backend="torch"))
    without = inference({name: tensor.detach() for name, tensor in inputs.items()})
    torch.testing.assert_close(without, mapped.detach())
    weights = torch.rand(3, dtype=torch.float64)
    arrays = list(inputs.values())
    found = torch.autograd.grad((weights * mapped.sum(dim=(1, 2, 3, 4))).sum(), arrays)
    total = sum(w * out.sum() for w, out in zip(weights, single, strict=True))
    for a, b in zip(found, torch.autograd.grad(total, arrays), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("expression", ["lucid_solve", "gated_delta", "laser"])
def test_gradients_without_operators_equal_those_of_operators_by_bytes(expression):
    """What counts a call sees operators; autograd alone gets the runner."""
    from torch.utils.flop_counter import FlopCounterMode

    m, x = pa.parse(expression), tensors_of(expression)

    def results():
        out = m(**x)
        found = torch.autograd.grad(out, list(x.values()), torch.ones_like(out))
        return out.grad_fn.name(), [out.detach(), *found]

    plain, found = results()
    with FlopCounterMode(display=False):
        counted, expected = results()
    assert plain != counted
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array.numpy(), other.numpy())


def test_changing_an_input_before_its_gradient_is_an_error():
    k, v = torch.randn(2, 1, 5, 2, 4).requires_grad_()
    given = k.clone()
    out = pa.LucidSolve()(given, v)
    given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()

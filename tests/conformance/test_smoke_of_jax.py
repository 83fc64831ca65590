"""A named JAX function is compared at level smoke by as many checks as a PyTorch function."""

import pytest

from precondattn_conformance import check
from precondattn_conformance.cases import cases
from precondattn_conformance.session import Session

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

ONLY_IN_PYTORCH = {"strides", "autocast", "threads"}


def of_smoke(library, **named):
    return [c for c in Session(**named).cases() if c.library == library]


def test_a_named_mechanism_has_in_jax_every_check_that_it_has_in_pytorch():
    for mechanism in ("softmax", "gated_delta", "lucid"):
        found, expected = (
            {c.check for c in of_smoke(library, mechanisms=(mechanism,))}
            for library in ("jax", "torch")
        )
        assert expected - found <= ONLY_IN_PYTORCH
        rows = [c for c in of_smoke("jax", mechanisms=(mechanism,)) if c.layout.block]
        assert len(rows) > 2


@pytest.mark.parametrize("named", [{"backend": ("jax",)}, {"libraries": ("jax",)}])
def test_a_named_backend_has_all_masks_and_gradients_in_jax_in_one_size(named):
    chosen = [c for c in of_smoke("jax", **named) if c.mechanism == "softmax"]
    checks = {c.check for c in chosen}
    assert {"outputs", "gradients", "packing", "padding", "future", "stability"} <= checks
    assert {"lengths", "segment_ids", "key_mask", None} == {c.layout.mask for c in chosen}
    assert len({(c.layout.b, c.layout.t, c.layout.h) for c in chosen}) == 1


def test_a_run_of_everything_has_no_more_of_jax_than_outputs():
    chosen = of_smoke("jax")
    assert {(c.check, c.layout.name, c.dtype) for c in chosen} == {("outputs", "plain", "float32")}
    assert len({c.mechanism for c in chosen}) == len(chosen)


def test_without_float64_the_cases_of_jax_are_in_float32():
    chosen = cases(
        "smoke",
        only_mechanisms=("softmax",),
        only_libraries=("jax",),
        is_narrow=lambda expression, library: True,
    )
    of_masks = [c for c in chosen if c.check == "outputs" and c.layout.name == "masked"]
    assert {c.dtype for c in of_masks} == {"float32"}


def test_rows_without_keys_that_are_a_mean_fail_at_smoke():
    """JAX's own attention does this with a mask; its plain and packed calls are right."""

    def with_a_mask(q, k, v, key_mask=None):
        t, s = q.shape[1], k.shape[1]
        k, v = (jax.numpy.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        visible = jax.numpy.tril(jax.numpy.ones((t, s), bool), s - t)[None, None]
        if key_mask is not None:
            visible = visible & key_mask[:, None, None, :]
        scores = jax.numpy.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jax.numpy.where(visible, scores, -1e30), axis=-1)
        return jax.numpy.einsum("bhts,bshe->bthe", weights, v)

    result = check(with_a_mask, "softmax", library="jax", checks=["outputs"], progress=False)
    wrong = {outcome.case.layout.name for outcome in result.failures}
    assert wrong == {"masked"}
    assert len(result.compared) > len(result.failures)

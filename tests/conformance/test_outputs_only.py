"""The outputs of a backend without gradients are compared, also by checks of gradients."""

import pytest

from precondattn_conformance import check
from precondattn_conformance.extremes import FORWARD_ONLY
from precondattn_conformance.report.result import Result
from precondattn_conformance.status import UNSUPPORTED

torch = pytest.importorskip("torch")

OF_OUTPUTS = (
    *("stability", "padding", "packing", "future", "dtypes"),
    *("determinism", "order_of_calls", "strides", "threads"),
)


def attend(q, k, v, key_mask=None, segment_ids=None):
    t, s = q.shape[1], k.shape[1]
    visible = torch.ones(1, 1, t, s, dtype=torch.bool).tril(s - t)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, None, s - t :, None] == segment_ids[:, None, None])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).nan_to_num() if key_mask is not None else scores.softmax(-1)
    v = v.masked_fill(~visible.any(-2)[..., None], 0)  # A NaN in padding must not count as a value.
    return (weights @ v).transpose(1, 2)


def checked(function, *checks, **options):
    return check(function, "softmax", library="torch", checks=checks, progress=False, **options)


def test_a_right_forward_passes_every_check_that_outputs_alone_can_tell():
    result = checked(attend, *OF_OUTPUTS, gradient=False)
    assert result.passed, str(result)
    for name, (right, _, _) in result.by_check.items():
        assert right, name
    assert "has no gradient" in result.outputs_only
    (count,) = result.outputs_only.values()
    assert count == sum(o.case.kind not in FORWARD_ONLY for o in result.compared)
    assert f"in outputs only ({count}): has no gradient" in str(result)
    assert "in outputs only" in result._repr_html_()


def as_if_contiguous(x):
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("packing", lambda q, k, v, segment_ids=None: attend(q, k, v)),
        ("padding", lambda q, k, v, key_mask=None: attend(q, k, v, key_mask.roll(1, 1))),
        ("stability", lambda q, k, v: attend(q.clamp(-30, 30), k, v)),
        ("strides", lambda q, k, v: attend(q, as_if_contiguous(k), v)),
    ],
)
def test_a_wrong_forward_fails_in_the_check_of_its_fault(name, wrong):
    result = checked(wrong, name, gradient=False)
    assert result.failures
    assert "off by" in result.failures[0].reason


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, cotangent):
        return 2 * cotangent


def test_a_gradient_that_is_claimed_and_wrong_still_fails():
    def wrong(q, k, v, segment_ids=None):
        return attend(WrongGradient.apply(q), k, v, segment_ids=segment_ids)

    result = checked(wrong, "packing")
    assert result.failures
    assert "vjp of q" in result.failures[0].reason
    assert not result.outputs_only


def test_a_backend_with_gradients_has_them_compared_and_the_record_says_who_has_none():
    with_gradient, without = (
        checked(attend, "strides", gradient=gradient) for gradient in (True, False)
    )
    assert with_gradient.passed, str(with_gradient)
    assert not with_gradient.outputs_only
    entries = [Result.of_outcome(run.compared[0]).to_json() for run in (with_gradient, without)]
    assert "outputs_only" not in entries[0]
    assert "has no gradient" in entries[1]["outputs_only"]
    assert Result.from_json(entries[1]).outputs_only == entries[1]["outputs_only"]


def test_what_has_no_forward_either_is_declined():
    result = checked(attend, "packing", gradient=False, dtypes=["float16"])
    assert {outcome.status for outcome in result.outcomes} <= {UNSUPPORTED}

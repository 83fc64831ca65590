"""No kernel backend ignores an option of softmax attention: each declines with a reason."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.backend import Request
from precondattn.dispatch.discovery import discover
from precondattn.dispatch.recognition import is_lucid

OPTIONS = {
    "softcap=2": "a soft cap",
    "sink=true": "a sink",
    "distance=slopes": "slopes of distances",
    "distance=buckets": "buckets of distances",
    "read=mean_and_log_sum": "the logarithms of its sums",
}
LIBRARIES = {"triton": "torch", "pallas": "jax", "cupy": "numpy"}


def request_of(mechanism, backend, verb):
    sizes = {"b": 1, "t": 8, "s": 8, "h": 2, "n": 2, "d": 16, "e": 16}
    shapes = tuple((name, p.shape(sizes)) for name, p in mechanism.inputs.items())
    return Request(
        verb=verb,
        library=LIBRARIES[backend],
        device="cpu",
        dtype="float32",
        shapes=shapes,
        masks=frozenset(),
        differentiated=False,
    )


UNSUPPORTED = {
    "triton": ("distance=buckets", "read=mean_and_log_sum"),
    "pallas": tuple(OPTIONS),
    "cupy": tuple(OPTIONS),
}
"""The options that a backend's kernels for softmax attention with a window do not have."""


@pytest.mark.parametrize("backend", sorted(UNSUPPORTED))
@pytest.mark.parametrize("verb", ["forward", "vjp"])
def test_a_kernel_backend_declines_what_it_has_no_kernel_for(backend, verb, monkeypatch):
    monkeypatch.setenv("PRECONDATTN_PALLAS_INTERPRET", "cuda")
    found = discover().named(backend)

    def refusal(mechanism):
        return found.refusal(mechanism, request_of(mechanism, backend, verb))

    assert refusal(pa.parse("softmax[window=4]")) is None
    for option in OPTIONS:
        base = pa.parse(f"softmax[window=4,{option}]")
        reason = refusal(base)
        assert (reason is None) == (option not in UNSUPPORTED[backend])
        if reason is not None:
            # If the table has no entry for a read, the class for another read is not asked.
            assert reason.endswith((f"with {OPTIONS[option]}", f"no kernels for {base}"))


@pytest.mark.parametrize("option", OPTIONS)
def test_lucid_around_them_is_not_plain_lucid(option):
    assert is_lucid(pa.parse("lucid").program)
    assert not is_lucid(pa.parse(f"lucid(softmax[{option}])").program)


def test_the_reason_names_the_option():
    from precondattn.kernel_backend.attention_options import declined_option

    for option, name in OPTIONS.items():
        reason = declined_option(pa.parse(f"softmax[{option}]"), "attention")
        assert reason == f"has no kernel for attention with {name}"
    assert declined_option(pa.Softmax(), "attention") is None


@pytest.mark.parametrize("text", ["softmax[softcap=1]", "softmax[sink=true]"])
def test_pytorch_computes_in_float32_for_half_precision(text):
    torch = pytest.importorskip("torch")
    rng, mechanism = np.random.default_rng(0), pa.parse(text)
    x = {"q": (1, 70, 2, 8), "k": (1, 70, 2, 8), "v": (1, 70, 2, 8)}
    x |= {"sink": (2,)} if mechanism.sink else {}
    x = {name: torch.tensor(rng.normal(size=shape)).bfloat16() for name, shape in x.items()}
    exact = mechanism(**{name: array.double() for name, array in x.items()}, backend="reference")
    out = mechanism(**x)
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 2**-8 * exact.abs().max()

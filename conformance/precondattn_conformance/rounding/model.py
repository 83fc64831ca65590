"""The error of a call with the rounding of the industry's kernels.

In float32 it is the error of the reference in float32, which has no blocks. Where terms cancel, an
error depends on chance, so it is also measured at inputs that differ by one ulp. In half precision
the model is a backend of NumPy arrays. It is the reference, except that softmax attention, LASER,
PaTH, LUCID's solve and the delta rule round the factors of their products (`attention.py`,
`lucid.py`, `delta_rule.py`). Everything else is in float64, so that the error comes from these
roundings alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from threading import Lock
from typing import NamedTuple, TypeGuard

import numpy as np

import precondattn as pa
from precondattn.algebra.piece import Piece
from precondattn.algebra.recurrences import Recurrences, is_in
from precondattn.arrays import Array, Arrays, Residuals
from precondattn.backend import Request
from precondattn.frame import Frame
from precondattn.method_backend import MethodRunner
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn_conformance.cancellation import Sizes
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.oracle import Oracle, oracle, rounded
from precondattn_conformance.rounding import lucid
from precondattn_conformance.rounding.attention import rounded_attention
from precondattn_conformance.rounding.delta_rule import without_scale
from precondattn_conformance.tolerance import SMALLEST, error

NAME = "rounding_model"
DELTA_RULES = Recurrences(("delta",), gate=(None, "head"), strength=("scalar",))

_registering = Lock()


def tf32(array: np.ndarray) -> np.ndarray:
    """An array as tensor cores read float32: only the first 10 bits of the fraction."""
    bits = array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


class RoundingModel(pa.Backend):
    """A backend whose leaves round their factors to a dtype."""

    name = NAME
    libraries = frozenset({"numpy"})
    wide_values = True
    only_by_name = True

    def __init__(self, dtype: str) -> None:
        to_call, to_float16 = (partial(rounded, dtype=name) for name in (dtype, "float16"))
        self.to = lucid.Roundings(to_call, to_float16, tf32)

    def prepare(self, piece: Piece, request: Request) -> pa.Runner | str:
        if len(piece.program.calls) > 1:
            return "rounds leaves only"
        is_attention = type(piece) in (pa.Softmax, pa.Path)
        is_attention = is_attention and getattr(piece, "read", None) != MEAN_AND_LOG_SUM
        # Bounded solves whose scores are inner products of keys.
        is_lucid = type(piece) is pa.LucidSolve and piece.has_unit_diagonal and piece.metric is DOT
        if is_attention or is_lucid or _is_delta(piece):
            return MethodRunner(self, piece)
        return "rounds softmax attention, LUCID and the delta rule only"

    def forward(
        self, mechanism: Piece, inputs: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        x = self._stored(inputs)
        if isinstance(mechanism, pa.LucidSolve):
            return lucid.forward(mechanism, x, frame, self.to), ()
        if _is_delta(mechanism):
            leaf, form = without_scale(mechanism, x["q"].shape[3], self.to.call)
            return leaf.run(leaf.zero_state(x), x, frame, form)[0], ()
        assert isinstance(mechanism, pa.Softmax | pa.Path)
        return rounded_attention(mechanism, self.to.call).forward(x, frame)[0], ()

    def backward(
        self,
        mechanism: Piece,
        inputs: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        x = self._stored(inputs)
        if isinstance(mechanism, pa.LucidSolve):
            return lucid.backward(mechanism, x, frame, self.to.call(out), cotangent, self.to)
        if _is_delta(mechanism):
            leaf, form = without_scale(mechanism, x["q"].shape[3], self.to.call)
            zeros = leaf.zero_state(x)
            d: Arrays = leaf.run_vjp(zeros, x, frame, cotangent, zeros, form)[0]
            return d
        assert isinstance(mechanism, pa.Softmax | pa.Path)
        return rounded_attention(mechanism, self.to.call).backward(x, frame, out, (), cotangent)

    def _stored(self, inputs: Mapping[str, Array]) -> Arrays:
        """Queries, keys and values rounded to the dtype of the call, as they are stored."""
        return {n: self.to.call(a) if n in ("q", "k", "v") else a for n, a in inputs.items()}


def _is_delta(piece: Piece) -> TypeGuard[pa.LinearFamily]:
    leaves = piece.program.leaves
    return len(leaves) == 1 and is_in(leaves[0], DELTA_RULES)


class ModelErrors(NamedTuple):
    """The model's errors, each measured as for any backend."""

    out: float
    gradients: dict[str, float]


@lru_cache(maxsize=64)
def errors_of_model(mechanism: str, layout: CallLayout, kind: str, dtype: str) -> ModelErrors:
    """The errors of the output and of the gradient of each input."""
    expected = oracle(mechanism, layout, kind, dtype)
    model = _runs_in_float32 if dtype == "float32" else _run_in_half_precision
    runs = list(model(mechanism, expected, dtype))

    def measured(result: np.ndarray, right: np.ndarray, terms: Sizes = 0.0) -> float:
        return error(rounded(result, dtype), right, terms, SMALLEST[dtype])

    return ModelErrors(
        max(measured(out, expected.out) for out, _ in runs),
        {
            name: max(measured(d[name], right, expected.terms.get(name, 0.0)) for _, d in runs)
            for name, right in expected.gradients.items()
        },
    )


Results = tuple[np.ndarray, Arrays]
"""An output and the gradients."""


def _runs_in_float32(mechanism: str, expected: Oracle, dtype: str) -> Iterator[Results]:
    """Float32 reference results at the inputs and at one-ulp perturbations."""
    m, unit = mechanism_of(mechanism), float(np.finfo(dtype).eps)
    rng = np.random.default_rng(0)
    for size in (0.0, unit, unit):
        inputs = {
            name: (array * (1 + size * rng.choice([-1, 1], array.shape))).astype(dtype)
            for name, array in expected.inputs.items()
        }
        out, pullback = m.vjp(**inputs, **expected.masks, backend="reference")
        yield out, pullback(expected.cotangent.astype(dtype))


def _run_in_half_precision(mechanism: str, expected: Oracle, dtype: str) -> Iterator[Results]:
    """Results of the rounding leaves, for the oracle's inputs and cotangent."""
    with _registering:
        pa.register_backend(RoundingModel(dtype))
        try:
            out, pullback = mechanism_of(mechanism).vjp(
                **expected.inputs, **expected.masks, backend=(NAME, "reference")
            )
            yield out, pullback(expected.cotangent)
        finally:
            pa.unregister_backend(NAME)

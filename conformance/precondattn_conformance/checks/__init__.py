"""The checks, in the order in which they are reported."""

from __future__ import annotations

from dataclasses import replace

from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.checks.autocast import Autocast
from precondattn_conformance.checks.cache_operations import CacheOperations
from precondattn_conformance.checks.caching import Alternation, Caching, Purity, Splits
from precondattn_conformance.checks.check import Backend, Check, Measured, Trial
from precondattn_conformance.checks.conventions import Conventions
from precondattn_conformance.checks.determinism import Determinism
from precondattn_conformance.checks.future import Future
from precondattn_conformance.checks.memory import Leaks, Memory
from precondattn_conformance.checks.order_of_calls import OrderOfCalls
from precondattn_conformance.checks.packing import Packing, PaddedLengths
from precondattn_conformance.checks.plain import Dtypes, Gradients, Outputs, Stability, explained
from precondattn_conformance.checks.refusals import Refusals
from precondattn_conformance.checks.sharding import Sharding
from precondattn_conformance.checks.states import States
from precondattn_conformance.checks.strides import StridedInputs
from precondattn_conformance.checks.threads import Threads
from precondattn_conformance.checks.transforms import DynamicShapes, Transforms
from precondattn_conformance.conventions import require_promised, unpromised_by
from precondattn_conformance.disagreement import DisagreementError

ALL: tuple[Check, ...] = (
    Outputs(),
    Gradients(),
    Caching(),
    Splits(),
    Alternation(),
    CacheOperations(),
    States(),
    Packing(),
    PaddedLengths(),
    Future(),
    Stability(),
    Dtypes(),
    Determinism(),
    OrderOfCalls(),
    Purity(),
    StridedInputs(),
    Refusals(),
    Transforms(),
    DynamicShapes(),
    Autocast(),
    Sharding(),
    Threads(),
    Leaks(),
    Memory(),
)
CHECKS = tuple(check.name for check in ALL)
CHECK: dict[str, Check] = {check.name: check for check in (*ALL, Conventions())}
"""Every check by its name, and `conventions`, which a run asks for at its end (`promises.py`)."""


def run(case: Case, backend: Backend = None, device: str | None = None) -> Measured:
    """Run one case on one backend, or on the backends chosen by default."""
    library = libraries.named(case.library, device)
    library.forget()
    check, trial = CHECK[case.check], Trial(case, library, backend, unpromised_by(backend))
    require_promised(case, trial.under_test, trial.unpromised)
    with library.precision(case.dtype):
        try:
            return replace(check.run(trial), outputs_only=trial.outputs_only)
        except DisagreementError as error:
            raise (error if check.is_plain else explained(trial, error)) from None

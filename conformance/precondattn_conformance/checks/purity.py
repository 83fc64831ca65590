"""The check `purity`: a call does not change a cache that was not donated."""

from __future__ import annotations

from precondattn_conformance.case import Case
from precondattn_conformance.checks.caching import Caching
from precondattn_conformance.checks.check import Measured, Trial
from precondattn_conformance.disagreement import require_unchanged
from precondattn_conformance.inputs import slice_tokens


class Purity(Caching):
    """A cache that was not donated is unchanged by a call, so that it can be extended again.

    Every check verifies that inputs were not written to. This one extends one cache twice with
    different tokens, as a search over continuations does.
    """

    name = "purity"
    snippet = """cache, steps = cache_of(case{where})
for new in (steps[0], steps[0]):  # The same cache again: the first call may not change it.
    out, _ = mechanism.extend(cache, **new, backend={backend})"""

    def applies(self, case: Case) -> bool:
        return case.layout.mask is None and case.layout.t > 2 and super().applies(case)

    def run(self, trial: Trial) -> Measured:
        m, time = trial.mechanism, trial.case.layout.t
        arrays = trial.numpy_inputs
        first = trial.arrays(slice_tokens(m, arrays, 0, time - 1))
        last = trial.arrays(slice_tokens(m, arrays, time - 1, time))
        # Other tokens at the same position.
        others = trial.arrays(slice_tokens(m, trial.reversed_inputs, time - 1, time))
        cache = m.init_cache(**trial.inputs, capacity=time)
        trial.require_used(m.explain(**last, cache=cache, backend=trial.backend))
        _, cache = m.extend(cache, **first, backend=trial.backend)
        before = {name: trial.numpy(a).copy() for name, a in cache.store.items()}
        m.extend(cache, **others, backend=trial.backend)
        for name, array in cache.store.items():
            what = f"the buffer {name!r} of a cache that was not donated"
            require_unchanged(what, trial.numpy(array), before[name])
        out, _ = m.extend(cache, **last, backend=trial.backend)
        expected = trial.expected.out[:, time - 1 :]
        return trial.agree({"the output from a cache used before": (trial.numpy(out), expected)})

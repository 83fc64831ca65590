"""The result of `explain`: which backend runs which piece, and why others do not."""

from __future__ import annotations

from dataclasses import dataclass

from precondattn.algebra.program import Program
from precondattn.backend import Request
from precondattn.dispatch.discovery import REFERENCE, Discovered
from precondattn.dispatch.plan import CallPlan, Considered
from precondattn.json_types import JsonObject


@dataclass(frozen=True)
class Explanation:
    """A plan, with the answers of all backends that were asked. `print` shows it."""

    mechanism: str
    program: Program
    request: Request
    plan: CallPlan
    discovered: Discovered
    batches: tuple[tuple[int, int], ...] = ()
    """(sequences, tokens) of the batches into which a packed call is divided; the plan is for the
    largest batch. Empty if the call is not divided."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The backend of each planned call, in order."""
        return tuple(call.backend.name for call in self.plan.calls)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, others: bool = False) -> str:
        """The plan as text; with `others`, why backends of other array libraries do not fit."""
        r = self.request
        masks = f", with {', '.join(sorted(r.masks))}" if r.masks else ""
        lines = [f"{self.mechanism}: {r.verb} of {r.library} {r.dtype} on {r.device}{masks}"]
        if self.batches:
            sizes = ", ".join(f"{b} x {t} tokens" for b, t in self.batches)
            lines.append(f"  segments as batches: {sizes}")
        for call in self.plan.calls:
            algorithm = f" ({call.runner.algorithm})" if call.runner.algorithm else ""
            lines.append(f"  {call.piece}  [{call.out}]: {call.backend.name}{algorithm}")
        refused = [
            c for c in self.plan.considered if not c.support.ok and c.backend != REFERENCE.name
        ]
        libraries = {each.name: each.libraries for each in self.discovered.backends}
        others_only = {name for name, each in libraries.items() if each and r.library not in each}
        hidden = set() if others else others_only & {c.backend for c in refused}
        shown = [c for c in refused if c.backend not in hidden]
        # The answers of backends that run a piece about a fused kernel.
        of_fused = [c for c in shown if len(c.calls) > 1 and c.backend in self.backends]
        if len(self.plan.calls) > 1 and {*self.backends} != {REFERENCE.name}:
            lines.append(f"  no fused kernel: the {len(self.plan.calls)} pieces run separately")
            lines += [f"  {self._reason(c)}" for c in of_fused]
        not_chosen = [self._reason(c) for c in shown if c not in of_fused]
        for name, error in self.discovered.broken:
            not_chosen.append(f"  {name} could not be imported: {error}")
        if not_chosen:
            lines += ["not chosen:", *not_chosen]
        if hidden:
            lines.append(f"for other array libraries: {', '.join(sorted(hidden))}")
        return "\n".join(lines)

    def _reason(self, considered: Considered) -> str:
        leaves = "; ".join(str(self.program.calls[i].leaf) for i in sorted(considered.calls))
        return f"  {considered.backend} for {leaves}: {considered.support.reason}"

    def as_dict(self) -> JsonObject:
        """The plan and all answers as lists and dicts of strings, for JSON."""
        r = self.request
        return {
            "mechanism": self.mechanism,
            "verb": r.verb,
            "library": r.library,
            "dtype": r.dtype,
            "device": r.device,
            "masks": sorted(r.masks),
            "pieces": [
                {
                    "piece": str(c.piece),
                    "value": c.out,
                    "backend": c.backend.name,
                    "algorithm": c.runner.algorithm,
                }
                for c in self.plan.calls
            ],
            "refusals": [
                {
                    "backend": c.backend,
                    "leaves": [str(self.program.calls[i].leaf) for i in sorted(c.calls)],
                    "reason": c.support.reason,
                    "by_name": c.support.by_name,
                }
                for c in self.plan.considered
                if not c.support.ok
            ],
            "broken": dict(self.discovered.broken),
        }

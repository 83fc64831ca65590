"""The printed plan: which backend runs which piece, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from precondattn.algebra.program import Program
from precondattn.backend import Request
from precondattn.dispatch.discovery import Discovered
from precondattn.dispatch.plan import Plan


@dataclass(frozen=True)
class Explanation:
    """A plan, with the answers of all backends that were queried. `print` it."""

    mechanism: str
    program: Program
    request: Request
    plan: Plan
    discovered: Discovered
    batches: tuple[tuple[int, int], ...] = ()
    """The batches that the segments of a packed call are divided into, as numbers of sequences and
    of tokens; the plan is that of the largest. Empty where the call is computed as it is."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The backend of each planned call, in order."""
        return tuple(call.backend.name for call in self.plan.calls)

    def __str__(self) -> str:
        r = self.request
        masks = f", with {', '.join(sorted(r.masks))}" if r.masks else ""
        lines = [f"{self.mechanism}: {r.verb} of {r.library} {r.dtype} on {r.device}{masks}"]
        if self.batches:
            sizes = ", ".join(f"{b} × {t} tokens" for b, t in self.batches)
            lines.append(f"  segments as batches: {sizes}")
        for call in self.plan.calls:
            lines.append(f"  {call.piece}  [{call.out}]: {call.backend.name}")
        refused = [c for c in self.plan.considered if not c.support.ok]
        shown = [c for c in refused if c.backend != "reference"]
        if shown:
            lines.append("not chosen:")
        for c in shown:
            leaves = "; ".join(str(self.program.calls[i].leaf) for i in sorted(c.calls))
            lines.append(f"  {c.backend} for {leaves}: {c.support.reason}")
        for name, error in self.discovered.broken:
            lines.append(f"  {name} could not be imported: {error}")
        return "\n".join(lines)

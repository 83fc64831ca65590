"""A run as rows, and its JSON file: a flat list of rows, the machine, and the date."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject


FORMAT = 1

TIMED, WRONG, UNSUPPORTED, FAILED = "timed", "wrong", "unsupported", "failed"


@dataclass
class Row:
    """The result of one case on one backend. Fields that were not measured are None or empty."""

    case: str
    mechanism: str
    work: str
    library: str
    device: str
    dtype: str
    sizes: dict[str, int]
    asked: str
    """The backend that was requested, or "default"."""
    backends: list[str] = field(default_factory=list)
    """The backends that run the calls of its program, in order."""
    status: str = FAILED
    reason: str = ""
    """Why there is no time."""
    error: float | None = None
    bound: float | None = None
    checked: str = ""
    """What was compared with the oracle."""
    first_call_seconds: float | None = None
    """The time of the first call, which includes compilation and one-time allocations."""
    seconds: dict[str, float] = field(default_factory=dict)
    """median, q1, q3 and rounds."""
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    """Each peer's ratio, ours / the peer's (median, q1, q3 and rounds), its own median time
    (seconds), and its error."""
    absent_peers: dict[str, str] = field(default_factory=dict)
    """The reason why there is no ratio to a peer, by peer."""
    flops: float | None = None
    bytes: float | None = None
    gemm_share: float | None = None
    """FLOP/s as a share of the machine's own in a GEMM."""
    copy_share: float | None = None
    """Bytes/s as a share of the machine's own in a copy."""
    peak_bytes: list[float] = field(default_factory=list)
    """Peak memory of a call with its inputs, at each of `peak_tokens`."""
    peak_tokens: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[object, ...]:
        """Rows of two records with the same key are comparable."""
        where = (self.library, self.device, self.dtype, self.asked)
        return (self.case, self.mechanism, self.work, *where, tuple(sorted(self.sizes.items())))

    @property
    def name(self) -> str:
        """The case with its number of tokens, library, dtype and backend."""
        backend = "" if self.asked == "default" else f" on {self.asked}"
        return f"{self.case} t={self.tokens} {self.library} {self.dtype}{backend}"

    @property
    def tokens(self) -> int:
        """The number of queries, or of keys where there are no queries."""
        return self.sizes.get("t") or self.sizes.get("s") or 0

    @property
    def growth(self) -> list[float]:
        """The factor by which the peak grows from each number of tokens to the next."""
        return [b / a for a, b in zip(self.peak_bytes, self.peak_bytes[1:], strict=False)]


@dataclass
class BenchRecord:
    """A run: its rows, its machine and its date."""

    date: str
    machine: JsonObject
    rates: list[JsonObject] = field(default_factory=list)
    """The machine's own rates, by library, device and dtype."""
    rows: list[Row] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, **asdict(self)}
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> BenchRecord:
    """A record from its file. Raises `ValueError` if that is no record, or has another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no record of a benchmark: {error}") from None
    declared = content.pop("format", None) if isinstance(content, dict) else None
    if declared != FORMAT:
        raise ValueError(f"{path} is no record of format {FORMAT}; found {declared!r}")
    try:
        rows = [Row(**row) for row in content.pop("rows")]
        record = BenchRecord(**content, rows=rows)
        # What `compare` reads first. A file that is edited by hand may have anything else.
        if not all(isinstance(each, dict) for each in (record.machine, *(r.sizes for r in rows))):
            raise TypeError("the machine and the sizes of rows are objects")
        return record
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} is no record of a benchmark: {error}") from None

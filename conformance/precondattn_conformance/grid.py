"""The layouts and kinds of keys with which each check runs, at each level.

smoke    every mechanism in every check that applies, on the data that finds most faults; for
         compositions that no class declares, the wiring
full     every check of every mechanism, on every library and dtype: all masks, kinds of keys and
         extremes, where the oracle's gradients are compared with central differences
stress   full, longer sequences, and memory

The design (`design/`) has rows of other sizes, widths, lengths and pairs of masks.
"""

from __future__ import annotations

from precondattn_conformance.declared import derived, is_class
from precondattn_conformance.design.levels import NAMED
from precondattn_conformance.extremes import EXTREMES
from precondattn_conformance.inputs import PLAIN, CallLayout
from precondattn_conformance.libraries import HALF, SHARING, WIDE

RAGGED = CallLayout("ragged", mask="lengths", broadcast="bh")
PACKED = CallLayout("packed", mask="segment_ids")
MASKED = CallLayout("masked", mask="key_mask", broadcast="bh")
PREFIX = CallLayout("prefix", mask="prefix")
PAIRS = CallLayout("pairs", mask="attn_mask")
PREFIX_BLOCKS = CallLayout(
    "prefix_blocks", t=65, s=65, h=2, n=1, d=16, e=8, mask="prefix+segments_edge", block=32
)
PREFIX_ROWS = CallLayout("prefix_rows", t=65, s=65, h=2, n=1, d=16, e=8, mask="prefix")
PREFIX_LONG = CallLayout("prefix_long", t=513, s=513, h=2, n=1, d=16, e=8, mask="prefix")
PREFIX_PAIRS = CallLayout("prefix_pairs", mask="prefix+attn_heads")
PAIRS_RAGGED = CallLayout("pairs_ragged", mask="lengths+attn_heads")
SINGLE = CallLayout("single_token", t=1, s=1)
FEWER = CallLayout("fewer_queries", t=3, s=9)
OWN_HEADS = CallLayout("own_kv_heads", h=3, n=3, values_per_head=1)
LESS_ONE = CallLayout("block_less_one", b=1, t=63, s=63, h=2, n=1, d=16, e=8)
AND_ONE = CallLayout("block_and_one", b=1, t=65, s=65, h=2, n=1, d=68, e=8)
REAL_SHORT = CallLayout("real_short", b=1, t=64, s=64, h=9, n=3, d=32, e=32)
REAL_128 = CallLayout("real_128", b=1, t=128, s=128, h=9, n=9, d=32, e=32)
BLOCKS = CallLayout("blocks", b=1, t=257, s=257, h=2, n=1, d=16, e=8)
PACKED_BLOCKS = CallLayout(
    "packed_blocks", b=1, t=130, s=130, h=2, n=1, d=16, e=8, mask="segment_ids"
)
FEWER_RAGGED = CallLayout("fewer_ragged", t=5, s=9, mask="lengths")
FEWER_PACKED = CallLayout("fewer_packed", t=3, s=9, mask="segment_ids")
FEWER_MASKED = CallLayout("fewer_masked", t=3, s=9, mask="key_mask")
WRITTEN_TWICE = CallLayout("written_twice", t=9, s=9, d=16)
WRITTEN_FAR = CallLayout("written_far", b=1, t=161, s=161, h=2, n=1, d=16)
LAST_OF_161 = CallLayout("last_of_161", b=1, t=3, s=161, h=2, n=1, d=16)
TWO_OF_33 = CallLayout("two_of_33", t=33, s=33, h=2, n=1, d=16, e=24)
LEAK = CallLayout("leak", b=32, t=64, s=64, h=8, n=8, d=32, e=32, values_per_head=1)
THREADS = CallLayout("threads", b=2, t=161, s=161, h=1, n=1, d=8, e=4)
LONG = CallLayout("long", b=1, t=2048, s=2048, h=2, n=2, d=32, e=32, m=16, values_per_head=1)

LAYOUTS = {each.name: each for each in [*globals().values()] if isinstance(each, CallLayout)}
"""All layouts of this file, by name."""

Data = tuple[tuple[CallLayout, str], ...]

SMOKE: Data = (
    (PLAIN, "clustered"),
    (RAGGED, "duplicate"),
    (PACKED, "zero"),
    (REAL_SHORT, "real"),
    (MASKED, "clustered"),
    (PREFIX_PAIRS, "clustered"),
)


def _all(kind: str, *layouts: CallLayout) -> Data:
    return tuple((layout, kind) for layout in layouts)


FULL: Data = (
    *SMOKE,
    *((PLAIN, kind) for kind in ("random", "duplicate", "zero")),
    *_all("random", SINGLE),
    *_all("clustered", FEWER, FEWER_RAGGED, FEWER_PACKED, LESS_ONE, AND_ONE),
    *_all("real", REAL_128),
    *_all("clustered", PREFIX, PAIRS, PREFIX_BLOCKS, PREFIX_ROWS, PAIRS_RAGGED),
)
SPECIAL: dict[str, Data] = {
    "splits": _all("clustered", PLAIN, RAGGED, MASKED, PREFIX, PAIRS, PREFIX_PAIRS),
    "alternation": _all("clustered", PLAIN, RAGGED, PREFIX_PAIRS),
    "cache_operations": _all("clustered", PLAIN, RAGGED),
    "packing": ((PACKED, "clustered"), (PACKED, "zero"), (PACKED_BLOCKS, "clustered")),
    "padding": _all("clustered", RAGGED),
    "future": _all("clustered", PLAIN, PACKED, AND_ONE, PACKED_BLOCKS),
    "stability": (
        *((layout, kind) for kind in EXTREMES[:-2] for layout in (PLAIN, AND_ONE)),
        *_all("far_segments", RAGGED, PACKED, FEWER, PACKED_BLOCKS),
        *_all("overwritten", WRITTEN_TWICE, WRITTEN_FAR),
        (LAST_OF_161, "opposite_values"),
    ),
    "dtypes": _all("random", PLAIN, OWN_HEADS),
    "determinism": _all("clustered", PLAIN, AND_ONE, RAGGED),
    "order_of_calls": _all("clustered", PLAIN, TWO_OF_33),
    "purity": _all("clustered", PLAIN),
    "strides": _all("clustered", PLAIN, RAGGED, AND_ONE),
    "refusals": _all("random", PLAIN),
    "transforms": _all("clustered", PLAIN),
    "dynamic_shapes": _all("clustered", PLAIN),
    "autocast": _all("clustered", PLAIN, RAGGED),
    "sharding": _all("clustered", PLAIN),
    "threads": _all("clustered", THREADS),
    "leaks": _all("random", LEAK),
    "memory": _all("random", LONG),
}
"""Data of checks that do not compare numbers at every size."""
DTYPES = {
    **dict.fromkeys(("threads", "dynamic_shapes", "sharding", "leaks", "memory"), WIDE[1:]),
    **{"autocast": HALF, "transforms": WIDE, "cache_operations": WIDE},
}
"""The dtypes of checks that do not run in all dtypes."""
AT_SMOKE: dict[str, tuple[str, Data]] = {
    **dict.fromkeys(("leaks", "memory", "transforms", "dynamic_shapes"), ("", ())),
    "autocast": ("bfloat16", SPECIAL["autocast"][:1]),
    "threads": ("float32", SPECIAL["threads"]),
    "future": ("float32", SPECIAL["future"][:2]),  # Kernels compute in float32.
    "stability": ("float64", tuple(e for e in SPECIAL["stability"] if e[0].s < 64)),
}
"""The dtype and data of special checks at `smoke`; of others, the first entry in float64."""
OF_HALF: Data = ((PLAIN, "long_keys"),)
"""Data of `stability` in half precision at `smoke`: values overflow."""

ONE_SIZE = (PLAIN, RAGGED, PACKED, MASKED)
"""Layouts of equal sizes. JAX compiles once for all of them, so that further ones cost little."""
OF_ONE_SIZE = (
    *("outputs", "gradients", "caching", "states", "packing"),
    *("padding", "future", "stability", "dtypes", "determinism"),
)
"""Checks whose calls have this one size, except for the single tokens of caches."""
FEW_IN_JAX = {"outputs": SMOKE[:1], "caching": SMOKE[1:2], "gradients": SMOKE[2:3]}
FEW_OF_KERNELS = {c: SPECIAL[c][:1] for c in ("stability", "packing", "padding", "determinism")}
"""One mask for each check of options in JAX, each time a different one, since every case has to be
compiled. A backend without float64 consists of kernels, which may read past the end of an array."""

DECODED = (OWN_HEADS, "huge_logits")
"""Additional data of the check `caching`: a step also subtracts the maximum over all tokens."""

STRESS: Data = (*FULL, (BLOCKS, "clustered"), (BLOCKS, "random"), (PREFIX_LONG, "clustered"))


def data(
    level: str,
    check: str,
    library: str,
    dtype: str,
    mechanism: str,
    *,
    is_alone: bool = False,
    is_narrow: bool = False,
    named: str = "",
) -> Data:
    """The layouts and kinds of keys of a check.

    `is_alone`: no other library is checked in this run. `is_narrow`: the backend computes this
    mechanism in float32 at most (`widest.py`). `named`: what the run names, one of `NAMED`.
    """
    if level == "smoke":
        if check == "threads" and (library != "torch" or not is_class(mechanism)):
            return ()  # Long sequences. Among the libraries only PyTorch has a number of threads.
        if library == "jax" and (named in NAMED[2:] or (named and is_class(mechanism))):
            return _smoke_of_named_jax(check, dtype, mechanism, named, is_narrow)
        if library == "jax" and (is_alone or is_narrow):
            few = FEW_IN_JAX | (FEW_OF_KERNELS if is_narrow else {})
            dtypes = ("float32", "bfloat16") if check == "outputs" else ("float32",)
            is_wanted = dtype in dtypes and mechanism not in derived()
            return few.get(check, ()) if is_wanted else ()
        if not is_narrow or dtype not in WIDE:
            return _smoke(check, library, dtype, mechanism)
        return _of_dtypes(check, library, WIDE, mechanism) if dtype == "float32" else ()
    is_main, is_derived = library in SHARING, mechanism in derived()
    if dtype not in DTYPES.get(check, WIDE + HALF):
        return ()
    if check in ("leaks", "memory"):
        # These checks measure a process, not arithmetic.
        is_wanted = is_main and not is_derived and (check == "leaks" or level == "stress")
        return SPECIAL[check] if is_wanted else ()
    chosen = SPECIAL.get(check, FULL if level == "full" else STRESS)
    if library == "jax" and level == "full" and dtype in HALF and check != "stability":
        # Each layout runs in one of the two half precisions, since every case has to be compiled.
        return chosen[HALF.index(dtype) :: len(HALF)]
    if check == "outputs" and dtype == "float32" and is_main and not is_derived:
        # Half a million elements, of which one may be wrong.
        return (*chosen, (LEAK, "random"))
    return (*chosen, DECODED) if check == "caching" else chosen


def _of_dtypes(check: str, library: str, dtypes: tuple[str, ...], mechanism: str) -> Data:
    """The data of `smoke` in any of these dtypes."""
    return tuple(dict.fromkeys(e for d in dtypes for e in _smoke(check, library, d, mechanism)))


def _smoke_of_named_jax(
    check: str, dtype: str, mechanism: str, named: str, is_narrow: bool
) -> Data:
    """PyTorch's cases in the widest dtype, and a few cases in other dtypes.

    Layouts of other sizes and checks that compile again are left out unless a mechanism is named
    together with a library or backend.
    """
    is_one = named == "mechanism"
    dtypes = ("float32", "float64") if is_narrow else ("float64",)
    if dtype != dtypes[0]:
        others = {"float32": ("outputs",), "bfloat16": ("outputs", "gradients", "stability")}
        count = None if is_one else 1
        is_wanted = check in others.get(dtype, ())[:count]
        return _smoke(check, "torch", dtype, mechanism)[:count] if is_wanted else ()
    entries = _of_dtypes(check, "torch", WIDE[1:] if check == "future" else dtypes, mechanism)
    if is_one:
        return tuple(entry for entry in entries if entry[0] is not REAL_SHORT)
    return tuple(entry for entry in entries if check in OF_ONE_SIZE and entry[0] in ONE_SIZE)


def _smoke(check: str, library: str, dtype: str, mechanism: str) -> Data:
    """All masks in float64, where the bounds are tightest; in other dtypes one case of each check.

    array_api_strict shows that only functions of the standard are used: outputs, and one gradient
    of each mechanism that a class declares. JAX compiles every operation for every shape and
    dtype, so there only the outputs are checked.
    """
    is_main, is_derived = library in SHARING, mechanism in derived()
    if check in SPECIAL:
        if is_derived or not is_main:
            return ()
        if check == "stability" and dtype in HALF:
            return OF_HALF
        dtype_of_check, chosen = AT_SMOKE.get(check, ("float64", SPECIAL[check][:1]))
        return chosen if dtype == dtype_of_check else ()
    if is_derived:
        one = {"outputs": SMOKE[2:3], "gradients": SMOKE[:1]}.get(check, SMOKE[1:2])
        return one if dtype == "float64" and is_main else ()
    if library == "jax":
        return SMOKE[:1] if check == "outputs" and dtype == "float32" else ()
    if not is_main:
        return SMOKE[2:3] if check in ("outputs", "gradients") and dtype == "float64" else ()
    if dtype == "float64":
        # Long sequences are slow: their outputs are compared in float32, and with the gradients.
        is_long = check in ("outputs", "states") or not is_class(mechanism)
        short = tuple(entry for entry in SMOKE if not (is_long and entry[0] is REAL_SHORT))
        return (*short, DECODED) if check == "caching" else short
    if dtype == "float32":  # The first rows of the design have gradients and caches in it.
        few: dict[str, Data] = {"outputs": (SMOKE[0], (REAL_SHORT, "real")), "caching": (DECODED,)}
        return few.get(check, ())
    return SMOKE[:1] if check in ("outputs", "gradients") or is_class(mechanism) else ()

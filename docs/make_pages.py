"""Write what follows from the library's declarations and from saved records.

python docs/make_pages.py

The stub `precondattn/shorthands.pyi`, for type checkers; the lists of mechanisms of a kind, between
`<!-- KIND -->` and `<!-- end -->`, on two pages; the numbers of the first pages; and:

    recipes.md          how a layer makes each input of each mechanism
    compositions.md     the bases that each preconditioner accepts, and reasons for refusals
    kernel_ledger.md    reports of the compilers, which their `--save` writes
    ecosystem.md        a run of `precondattn ecosystem`; judgements that do not fit raise an error
    versions.md         test runs, which `nox -f conformance/versions/noxfile.py -- --save` writes
    paper_models.md     the numbers of parameters of the models in its rows
"""

import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path

from make_performance import load_curves
from recorded import DOCS, load, load_all, with_measured

import precondattn as pa
from precondattn.algebra import registry
from precondattn_conformance.bench.plot import ratios_to_plain
from precondattn_conformance.checks import CHECKS
from precondattn_conformance.ecosystem.judgement import require_true
from precondattn_conformance.ecosystem.judgements import JUDGEMENTS
from precondattn_conformance.ecosystem.page import page as ecosystem_page
from precondattn_conformance.ecosystem.table import load as load_table

STUB = Path(pa.__file__).with_name("shorthands.pyi")
LISTS = (DOCS / "mechanisms" / "index.md", DOCS / "which_mechanism.md")
FIRST = {DOCS.parent / "README.md": "docs/", DOCS / "index.md": ""}
"""The pages with the numbers, and how their links to other pages begin."""
MEASUREMENTS = DOCS / "measurements"
KERNELS, VERSIONS = MEASUREMENTS / "kernels", MEASUREMENTS / "versions" / "runs.json"

STUB_HEAD = '''\
"""The parameters of the shorthands, which `docs/make_pages.py` writes from the declarations.

The text of an array's annotation is its shape (`precondattn/algebra/declaration.py`).
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Array

'''


def stub() -> str:
    """The stub, as the formatter leaves it."""
    names = [name for name in sorted(pa.__all__) if registry.known(name)]
    listed = "".join(f'    "{name}",\n' for name in names)
    functions = "\n\n".join("\n".join(_function(name, getattr(pa, name))) for name in names)
    return f"{STUB_HEAD}__all__ = [\n{listed}]\n\n{functions}\n"


def _function(name: str, function) -> Iterator[str]:
    signature = inspect.signature(function)
    yield f"def {name}("
    by_position = True
    for parameter in signature.parameters.values():
        if by_position and parameter.kind is parameter.KEYWORD_ONLY:
            by_position = False
            yield "    *,"
        value = parameter.default
        text = f'"{value}"' if isinstance(value, str) else repr(value).replace("'", '"')
        default = "" if value is parameter.empty else f" = {text}"
        yield f"    {parameter.name}: {parameter.annotation}{default},"
    yield f") -> {signature.return_annotation}:"
    first, *rest = (function.__doc__ or "").splitlines()
    yield f'    """{first}'
    yield from (f"    {line}" if line else "" for line in rest)
    yield '    """'


def ours() -> dict[str, type[pa.Mechanism]]:
    """The mechanisms of this library in order of their names, without those of a user."""
    classes = sorted(pa.mechanisms().items())
    return {name: cls for name, cls in classes if cls.__module__.startswith("precondattn.")}


def kinds(r: pa.Recurrence) -> Iterator[str]:
    """The names of the lists that a recurrence is on."""
    if r.rule == "add" and r.normaliser is None:
        yield "additive"
        if r.gate is not None and r.reads == "after":
            yield "forgetting"
    if r.rule not in ("delta", "low rank"):
        return
    if r == pa.Recurrence("delta", gate=r.gate, strength="scalar", heads=r.heads):
        yield "delta"
        yield f"delta by {r.gate}"
        return
    yield "general delta"
    if r.rule == "delta" and r.steps is None:
        yield "erasing"


def with_lists(page: Path) -> str:
    """The text of a page, with its lists: first mechanisms without a decay."""
    gates = (None, "fixed", "head", "channel")
    found: dict[str, list[tuple[int, str]]] = {}
    for name, cls in ours().items():
        recurrence = cls().recurrence
        if cls.role == "base" and recurrence is not None:
            for kind in kinds(recurrence):
                found.setdefault(kind, []).append((gates.index(recurrence.gate), name))

    def listed(match: re.Match[str]) -> str:
        return (
            f"{match[1]}{', '.join(f'`{name}`' for _, name in sorted(found[match[2]]))}{match[3]}"
        )

    text = page.read_text(encoding="utf-8")
    return re.sub(r"(<!-- ([\w ]+) -->)[^<]*(<!-- end -->)", listed, text)


def recipes() -> tuple[str, str]:
    """The recipes of the inputs of each mechanism; their equations and sources."""
    from precondattn.layers.recipes.published import PUBLISHED

    inputs = ["| mechanism | recipes of its inputs |", "|---|---|"]
    known = {repr(recipe): recipe for of_leaf in PUBLISHED.values() for recipe in of_leaf.values()}
    kinds = [type(recipe) for recipe in known.values()]
    for leaf, of_leaf in PUBLISHED.items():
        names: dict[str, list[str]] = {}
        for name, recipe in of_leaf.items():
            alone, _, like = name.partition("/")
            shown = f"`{alone}`" + (f" (shaped as `{like}`)" if like else "")
            is_alone = kinds.count(type(recipe)) == 1
            text = type(recipe).__name__ if is_alone else repr(recipe)
            names.setdefault(text, []).append(shown)
        texts = [f"{', '.join(shown)}: `{text}`" for text, shown in names.items()]
        inputs.append(f"| `{leaf}` | {'; '.join(texts)} |")
    equations = ["| recipe | equation | source |", "|---|---|---|"]
    for text, recipe in sorted(known.items()):
        both = (recipe.equation, recipe.source.split("; ")[0] or "–")
        cells = (re.sub(r"([|_^*])", r"\\\1", x) for x in both)
        equations.append(f"| `{text}` | {' | '.join(cells)} |")
    return "\n".join(inputs), "\n".join(equations)


def refusal(outer: type[pa.Mechanism], inner: str) -> str | None:
    """The reason for which a preconditioner refuses a base; None where it accepts it."""
    try:
        outer(base=pa.parse(inner))
    except TypeError as error:
        return str(error).partition(" makes no sense: ")[2].partition("; write ")[0]
    return None


def compositions() -> tuple[str, str]:
    """Outer and inner mechanisms, with variants of bases that others refuse; the reasons."""
    rows = {n: c for n, c in ours().items() if c.role == "preconditioner"}
    bases = {n: c for n, c in ours().items() if c.role == "base"}
    variants = []
    for name, base in bases.items():
        patterns = []
        for inner in (name, *base.variants):
            accepted = [refusal(row, inner) is None for row in rows.values()]
            if accepted not in patterns:
                patterns.append(accepted)
                variants += [inner] if inner != name else []
    refused: dict[str, dict[str, None]] = {}
    columns: dict[tuple[str | None, ...], list[str]] = {}
    for inner in (*bases, *variants, *rows):
        found = tuple(refusal(outer, inner) for outer in rows.values())
        columns.setdefault(found, []).append(f"`{inner}`")
    lines = [
        f"| | {' | '.join(map(', '.join, columns.values()))} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for i, name in enumerate(rows):
        for reason in filter(None, (found[i] for found in columns)):
            refused.setdefault(reason, {})[f"`{name}`"] = None
        cells = (str([*refused].index(of[i]) + 1) if of[i] else "✓" for of in columns)
        lines.append(f"| **`{name}`** | {' | '.join(cells)} |")
    reasons = enumerate(refused.items(), 1)
    return "\n".join(lines), "\n".join(f"{i}. {', '.join(of)}: {x}." for i, (x, of) in reasons)


def ledger() -> tuple[str, str]:
    """Tables of the reports of compilers; and what other versions of compilers do."""
    reports = load_all(KERNELS)
    others = "\n".join(f"* {_compared(x, reports)}" for x in load_all(KERNELS / "other_versions"))
    return "\n\n".join(map(_compiled, reports)), others


def _compiled(report: dict) -> str:
    """A row for each kernel of a report, a column for each target."""
    targets = list(dict.fromkeys(v["target"] for v in report["variants"]))
    by_kernel: dict[str, list[dict]] = {}
    for variant in report["variants"]:
        # The kernel of `laser float32 64 _close` or of `softmax_forward<float, 64>`.
        words = re.sub("<.*", "", variant["name"]).split()
        by_kernel.setdefault([x for x in words if x.isidentifier()][-1], []).append(variant)
    lines = [f"## {_versions(report)}\n", f"| kernel | variants | {' | '.join(targets)} |"]
    lines.append("|---" * (len(targets) + 2) + "|")
    spilling = {k: of for k, of in by_kernel.items() if any(v["spilt_bytes"] for v in of)}
    others = [v for kernel, of in by_kernel.items() if kernel not in spilling for v in of]
    rows = [(f"`{kernel}`", of) for kernel, of in sorted(spilling.items())]
    for kernel, variants in [*rows, (f"{len(by_kernel) - len(spilling)} others", others)]:
        names = {variant["name"] for variant in variants}
        cells = [_largest([v for v in variants if v["target"] == target]) for target in targets]
        lines.append(f"| {kernel} | {len(names)} | {' | '.join(cells)} |")
    failed = [v for v in report["variants"] if v["failures"]]
    lines += [f"\n`{v['name']}` for {v['target']}: {v['failures'][0]}" for v in failed]
    return "\n".join(lines)


def _largest(variants: list[dict]) -> str:
    """The largest numbers of a kernel's variants for one target."""
    if not variants:
        return "–"
    numbers = ("registers", "spilt_bytes", "shared_bytes")
    registers, spilt, shared = (max(v[name] for v in variants) for name in numbers)
    return f"{registers}/{spilt}/{shared / 1024:.0f}"


def _compared(other: dict, reports: list[dict]) -> str:
    """How many kernels fail with other versions, or spill more bytes."""
    same = (v for report in reports if {*report} == {*other} for v in report["variants"])
    spilt = {(v["name"], v["target"]): v["spilt_bytes"] for v in same}
    variants = other["variants"]
    failing = sum(bool(v["failures"]) for v in variants)
    more = sum(v["spilt_bytes"] > spilt.get((v["name"], v["target"]), 0) for v in variants)
    return (
        f"{_versions(other)}: {len(variants)} variants, of which {failing} fail and {more} spill"
        " more bytes than above."
    )


def _versions(report: dict) -> str:
    source = f", from JAX {report['jax']}" if "jax" in report else ""
    compiler = f"Triton {report['triton']}" if "triton" in report else f"NVRTC {report['nvrtc']}"
    return compiler + source


def versions() -> tuple[str]:
    """The saved runs of the sessions of the noxfile, and the versions of each."""
    records = load(VERSIONS)
    found = {(r["set"], r["python"].rpartition(".")[0], r["session"]): r for r in records}
    sets = (("lowest", "3.11"), ("newest", "3.12"), ("newest", "3.13"))
    every = [("pinned", "3.11", "everything")]
    every += [(*x, session) for x, session in product(sets, ("numpy", "frameworks", "kernels"))]
    lines = ["| set | Python | session | passed | failed | skipped | date | versions |"]
    lines.append("|---" * 8 + "|")
    for key in every:
        if key not in found:
            lines.append(f"| {' | '.join(key)} | not run | | | | |")
            continue
        record = found[key]
        totals = (str(sum(x[n] for x in record["runs"])) for n in ("passed", "failed", "skipped"))
        used = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
        cells = (key[0], record["python"], key[2], *totals, record["date"], used)
        lines.append(f"| {' | '.join(cells)} |")
    return ("\n".join(lines),)


MODEL = re.compile(r"^\| (.+?) \| `(\w+\(.+)` \| [\d,]* \| ([\d.]+[MB])?.* \|$", re.M)
"""A row of `paper_models.md`: a model, the call that makes it, and its stated size if any."""


def with_sizes(page: Path) -> str:
    """The text of the page, with numbers of parameters, and whether they are the stated ones."""

    def row(found: re.Match[str]) -> str:
        name, arguments, stated = found.groups()
        verdict = ", fits" if stated and fits(count(arguments), stated) else ", **does not fit**"
        end = f"{stated}{verdict}" if stated else "–"
        return f"| {name} | `{arguments}` | {count(arguments):,} | {end} |"

    return MODEL.sub(row, page.read_text(encoding="utf-8"))


@cache
def count(arguments: str) -> int:
    """The number of parameters of the model that such a call makes."""
    from precondattn.layers.recipes import CCQ_SIZES
    from precondattn.layers.torch import Decoder, VisionTransformer

    made = {each.__name__: partial(each, device="meta") for each in (Decoder, VisionTransformer)}
    return sum(x.numel() for x in eval(arguments, {**made, "CCQ_SIZES": CCQ_SIZES}).parameters())


def fits(counted: int, stated: str) -> bool:
    """Whether a number of parameters is the stated one, `301M`, when it is rounded like that."""
    number, unit = stated[:-1], {"M": 10**6, "B": 10**9}[stated[-1]]
    decimals = len(number.partition(".")[2]) or len(number.rstrip("0")) - len(number)
    return round(counted / unit, decimals) == float(number)


def numbers(to: str) -> str:
    """The list of numbers of the first pages, with links that begin with `to`."""
    known = ours()
    outer = [cls for cls in known.values() if cls.role == "preconditioner"]
    pairs = sum(refusal(cls, inner) is None for cls in outer for inner in known)
    ecosystem = load(MEASUREMENTS / "ecosystem" / "smoke.json")
    curves = ratios_to_plain(load_curves()["cpu_2_cores_torch"].rows)["forward"]
    times = {name: dict(curves[name])[8192] for name in ("lucid", "path", "gated_delta")}
    forwards = ", ".join(f"`{name}` {time:.2g}" for name, time in times.items())
    reports = [load(KERNELS / f"{name}.json") for name in ("nvidia", "cuda", "pallas")]
    compiled = sum(len({each["name"] for each in report["variants"]}) for report in reports)
    has_run = any((MEASUREMENTS / "gpu").glob("*.json"))
    ran = "Some have run on a GPU" if has_run else "**None has run on a GPU**, and neither has CuPy"
    return "\n".join(
        (
            f"- **{len(known)} mechanisms × 5 array libraries**: {len(known) - len(outer)} bases,"
            f" which compute attention by themselves, and {len(outer)} preconditioners, which wrap"
            f" another mechanism ([{pairs} pairs]({to}compositions.md) are possible), on"
            " NumPy, PyTorch, JAX, CuPy and array-api-strict.",
            f"- **{len(CHECKS)} kinds of checks** for any implementation of a mechanism, applied to"
            f" our own backends and to [public functions]({to}ecosystem.md) of other libraries:"
            f" {len(ecosystem['rows'])} implementations in all.",
            f"- **Time on a CPU**, as a multiple of PyTorch's plain attention at 8,192 tokens:"
            f" {forwards} ([all measurements]({to}performance.md)).",
            f"- **GPU**: {compiled:,} variants of kernels compile. {ran}"
            f" ([ledger]({to}kernel_ledger.md)).",
        )
    )


def with_numbers(page: Path, to: str) -> str:
    begin, end = "<!-- numbers: begin -->", "<!-- numbers: end -->"
    block = f"{begin}\n{numbers(to)}\n{end}"
    text = page.read_text(encoding="utf-8")
    return re.sub(f"{begin}.*?{end}", lambda _: block, text, flags=re.DOTALL)


MEASURED = {"recipes": recipes, "compositions": compositions, "kernel_ledger": ledger}
MEASURED["versions"] = versions


def texts() -> Iterator[tuple[Path, str]]:
    """Every file that this script writes."""
    yield STUB, stub()
    yield from ((page, with_lists(page)) for page in LISTS)
    yield from ((page, with_numbers(page, to)) for page, to in FIRST.items())
    for name, parts in MEASURED.items():
        page = DOCS / f"{name}.md"
        yield page, with_measured(page, *parts())
    ecosystem = load_table(MEASUREMENTS / "ecosystem" / "smoke.json")
    require_true(ecosystem, JUDGEMENTS)
    yield DOCS / "ecosystem.md", ecosystem_page(ecosystem, JUDGEMENTS)


if __name__ == "__main__":
    models = DOCS / "paper_models.md"
    for path, text in [*texts(), (models, with_sizes(models))]:
        path.write_text(text, encoding="utf-8")

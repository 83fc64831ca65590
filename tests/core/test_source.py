"""Rules of the source that no linter has: circles of imports, names, texts, types, frameworks."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import precondattn as pa
from precondattn.algebra import registry
from precondattn_conformance.declared import expressions
from tests.processor_time import LOOP, compare
from tests.representatives import REPRESENTATIVES

ROOT = Path(__file__).parents[2]
FOLDERS = ("precondattn", "backends", "conformance", "tests", "docs")
LARGEST_CIRCLE = 2
"""Files of a circle of imports: two halves of one idea may name each other's types."""
MOST_ANY = 20
"""Uses of `Any` without a name: an array is an `Array`, JSON is `Json`."""

LAYERS = ("precondattn/layers/torch", "precondattn/layers/flax")
DIVIDED = ("precondattn/parallel/torch", "precondattn/parallel/jax")
BLOCKS = ("backends/precondattn_portable", "backends/precondattn_jax")
KERNELS = tuple(f"backends/precondattn_{name}" for name in ("triton", "pallas", "cupy"))
TOOLS = tuple(
    f"conformance/precondattn_kernel_tools/{name}"
    for name in (
        *("triton_compiler.py", "pallas_compiler.py", "cuda_compiler.py"),
        *("triton_memory.py", "pallas_interpreter.py", "cuda_simulator"),
    )
)

SHARED = {
    # The layer of PyTorch, and its twin of Flax.
    LAYERS: """Affine Attention Block BlockMLP Decoder MLP Patches VisionAttention
        VisionBlock VisionTransformer _Draw""",
    # The module of a layer, and the leaf or the recipe that it computes.
    (*LAYERS, "precondattn/spec", "precondattn/layers/recipes"): "LayerNorm Norm",
    # Among the processes of PyTorch, and among the devices of JAX.
    DIVIDED: """ContextParallel DividedCall RingCall RingPair SolveBlocks
        _Scan""",
    # What computes the same in several backends.
    BLOCKS: """AttentionBlocks CappedScores ChannelDecay ChunkWork DeltaFormerBlocks DeltaRule
        DotScores ForgetGate HeadAdditive KeyAdditive KeyDeltaRule LogMeanExpRead LucidSolveBlocks
        Mask MeanAndLogSumRead MeanRead QueryWeighted ReadRows Similarities
        SolvingChunkwise SymmetricLucidSolveBlocks TransportedScores ValueAdditive
        WindowedBlocks""",
    KERNELS: """Configuration KernelMasks LaserKernels LucidPlan LucidSolveKernels
        RecurrenceKernels SoftmaxKernels UnitRowsKernels ValueSpread""",
    (*BLOCKS, *KERNELS): "Chunkwise LucidMatrix LucidStep",
    # What a kernel may do wrong, and how it is shipped, in the languages of kernels.
    TOOLS: "OutOfBoundsError RaceError Variant",
}


def files_of(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.fixture(scope="module")
def trees():
    """The parsed files of the library, its backends and the suite, by path."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files_of(*FOLDERS[:3])}


def within(trees, folder):
    return {path: tree for path, tree in trees.items() if path.is_relative_to(ROOT / folder)}


def imported(tree, names):
    """What a file imports, also lazily and for annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in names else str(node.module) for name in full)


def reachable(name, graph):
    seen, waiting = set(), [name]
    while waiting:
        for other in graph[waiting.pop()] - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def test_no_circle_of_imports_has_more_than_two_files(trees):
    files = {}
    for path, tree in within(trees, "precondattn").items():
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = tree
        assert not path.stem.endswith(("_torch", "_jax")), path  # It has a room for each.
    graph = {n: {i for i in imported(t, files) if i in files} - {n} for n, t in files.items()}
    reached = {name: reachable(name, graph) for name in graph}
    circles = {frozenset(o for o in reached[n] if n in reached[o]) for n in graph}
    assert [sorted(c) for c in circles if len(c) > LARGEST_CIRCLE] == []


def test_a_class_name_has_one_meaning():
    """It is defined once, or for the same thing in several rooms."""
    places = defaultdict(list)
    for path in files_of(*FOLDERS):
        for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            places[name].append(path.relative_to(ROOT))
    for name, paths in places.items():
        if len(paths) > 1:  # A text of a class may be among them.
            of_file = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in paths}
            places[name] = [
                path
                for path, tree in of_file.items()
                if name in {getattr(n, "name", "") for n in tree.body}
            ]
    several = {name: paths for name, paths in places.items() if len(paths) > 1}
    rooms_of = {name: rooms for rooms, names in SHARED.items() for name in names.split()}
    for name, paths in several.items():
        files = [str(path) for path in paths]
        assert name in rooms_of, f"{name} is in {files}: say in its name whose it is"
        rooms = [room for path in paths for room in rooms_of[name] if path.is_relative_to(room)]
        assert len(set(rooms)) == len(paths), f"{name}: {files} are not {rooms_of[name]}"
    assert rooms_of.keys() <= several.keys()


def test_texts_that_are_printed_or_raised_are_ascii(trees):
    """Docstrings, "…" as axes of recipes, and the signs of their equations are exempt."""
    suite = ROOT / "conformance/precondattn_conformance"
    for path, tree in trees.items():
        if (path.is_relative_to(ROOT / "conformance") and path.parent != suite) or (
            path.name == "recipe.py"
        ):
            continue
        nodes = [*ast.walk(tree)]
        exempt = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        has_axes = path.parent.name == "recipes" or path.name in ("parameters.py", "plan.py")
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in exempt:
                text = str(node.value).replace("…", "" if has_axes else "…")
                assert text.isascii(), (path, text)


def is_triton_kernel(node):
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
    )


def nodes_beside_kernels(nodes):
    """These nodes and all below them, but for what is in a kernel of Triton."""
    nodes = list(nodes)
    while nodes:
        node = nodes.pop()
        if not is_triton_kernel(node):
            yield node
            nodes.extend(ast.iter_child_nodes(node))


def test_any_stands_almost_nowhere_without_a_name(trees):
    number = Counter()
    for path, tree in trees.items():
        alias = (ast.Name, ast.Subscript, ast.BinOp)  # `Array = Any`, `Arrays = dict[str, Any]`
        body = [
            n for n in tree.body if not (isinstance(n, ast.Assign) and isinstance(n.value, alias))
        ]
        uses = [n for n in nodes_beside_kernels(body) if isinstance(n, ast.Name) and n.id == "Any"]
        number[str(path.relative_to(ROOT))] += len(uses)
    assert number.total() <= MOST_ANY, number.most_common(20)


def test_of_tritons_functions_only_kernels_have_no_types(trees):
    for path, tree in within(trees, "backends/precondattn_triton").items():
        for node in nodes_beside_kernels([tree]):
            if isinstance(node, ast.FunctionDef):
                assert node.returns, f"{path.name}: {node.name} has no types"


def test_the_oracle_names_no_framework_and_the_core_neither_backends_nor_conformance():
    framework = re.compile(r"\b(torch|jax|cupy|lax|sys\.modules|library_of|import numpy)\b")
    for path in (ROOT / "precondattn").rglob("*.py"):
        text = path.read_text()
        if path.parent.name == "spec":
            code = re.sub(r'"""[\s\S]*?"""|#.*', "", text)
            assert framework.search(code) is None, path
        if not path.name.endswith("commands.py"):  # They load what a subcommand needs.
            assert "precondattn_" not in re.sub(r"\"precondattn_\w+\"", "", text), path


def kinds_in(expression):
    """The classes of a mechanism, of its bases and leaves, and the recurrences of the leaves."""
    mechanism = pa.parse(expression)
    kinds = {type(leaf) for leaf in mechanism.program.leaves} | {type(mechanism)}
    kinds |= {leaf.recurrence for leaf in mechanism.program.leaves}
    while hasattr(mechanism, "base"):
        mechanism = mechanism.base
        kinds.add(type(mechanism))
    return kinds - {None}


def test_every_class_of_the_library_or_its_recurrence_is_in_a_representative():
    # Other tests register classes too.
    ours = {c for c in registry.registered().values() if c.__module__.startswith("precondattn.")}
    kinds = set().union(*map(kinds_in, REPRESENTATIVES))
    missing = [c.name for c in ours if c not in kinds and c().recurrence not in kinds]
    assert not missing, f"tests/representatives.py lacks {sorted(missing)}"
    assert set(REPRESENTATIVES) <= set(expressions())
    assert len(set(REPRESENTATIVES)) == len(REPRESENTATIVES)


BEFORE = {LOOP: 0.03, "tests/a.py": 10.0, "tests/b.py": 30.0}


@pytest.mark.parametrize(
    ("run", "is_within", "grown"),
    [
        (BEFORE, True, []),
        ({LOOP: 0.03, "tests/a.py": 13.0, "tests/b.py": 30.0}, True, ["tests/a.py"]),
        ({LOOP: 0.02, "tests/a.py": 10.0, "tests/b.py": 30.0}, False, ["tests/b.py", "tests/a.py"]),
        (BEFORE | {"tests/new.py": 9.0}, False, ["tests/new.py"]),
    ],
)
def test_a_run_beside_the_budget(run, is_within, grown):
    comparison = compare(run, BEFORE)
    assert (comparison.is_within, [file for file, *_ in comparison.grown]) == (is_within, grown)
    assert all(file in str(comparison) for file in grown) or is_within

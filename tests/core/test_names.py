"""A class name has one meaning: it is defined once, or for the same thing in several rooms."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("precondattn", "backends", "conformance", "tests", "docs")

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
    LAYERS: """Affine Attention Block BlockMLP Decoder MLP ModuleMap Patches VisionAttention
        VisionBlock VisionTransformer _Draw""",
    # The module of a layer, and the leaf or the recipe that it computes.
    (*LAYERS, "precondattn/spec", "precondattn/layers/recipes"): "LayerNorm Norm",
    # Among the processes of PyTorch, and among the devices of JAX.
    DIVIDED: """ContextParallel DividedCall DividedPiece RingCall RingPair SolveBlocks
        _Scan""",
    # What computes the same in several backends.
    BLOCKS: """AttentionBlocks CappedScores ChannelDecay ChunkWork DeltaFormerBlocks DeltaRule
        DotScores ForgetGate HeadAdditive KeyAdditive KeyDeltaRule LogMeanExpRead LucidSolveBlocks
        Mask MeanAndLogSumRead MeanRead OutlookRows QueryWeighted ReadRows Similarities
        SymmetricLucidSolveBlocks TransportedScores ValueAdditive WindowedBlocks""",
    KERNELS: """Configuration KernelMasks LaserKernels LucidPlan LucidSolveKernels
        RecurrenceKernels SoftmaxKernels UnitRowsKernels ValueSpread""",
    (*BLOCKS, *KERNELS): "Chunkwise LucidMatrix LucidStep SolvingChunkwise",
    # What a kernel may do wrong, and how it is shipped, in the languages of kernels.
    TOOLS: "OutOfBoundsError RaceError Variant",
}


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT))
    several = {name: paths for name, paths in places.items() if len(paths) > 1}
    rooms_of = {name: rooms for rooms, names in SHARED.items() for name in names.split()}
    for name, paths in several.items():
        named = [str(path) for path in paths]
        assert name in rooms_of, f"{name} is in {named}: say in its name whose it is"
        rooms = [room for path in paths for room in rooms_of[name] if path.is_relative_to(room)]
        assert len(set(rooms)) == len(paths), (
            f"{name} is in {named}, which are not {rooms_of[name]}"
        )
    assert rooms_of.keys() <= several.keys()


def test_texts_that_are_printed_or_raised_are_ascii():
    """Docstrings, "…" as axes of recipes, and the signs of their equations are exempt."""
    files = [path for folder in FOLDERS[:2] for path in (ROOT / folder).rglob("*.py")]
    for path in (*files, *(ROOT / "conformance/precondattn_conformance").glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        exempt = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        has_axes = path.parent.name == "recipes" or path.name in ("parameters.py", "plan.py")
        for node in nodes if path.name != "recipe.py" else ():
            if isinstance(node, ast.Constant) and id(node) not in exempt:
                text = str(node.value).replace("…", "" if has_axes else "…")
                assert text.isascii(), (path, text)

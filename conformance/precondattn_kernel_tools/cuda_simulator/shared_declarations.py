"""Rewrites a preprocessed CUDA source as C++ by replacing CUDA's keywords.

A variable in shared memory becomes a reference to memory that the runtime allocates for each block,
with guard regions around it and with the variable's name:

    __shared__ float tile[32][33];     typedef float tile_type[32][33]; … tile_type& tile = …;
    extern __shared__ float rows[];    float* rows = …;
"""

from __future__ import annotations

import re
from collections.abc import Iterator

SHARED = re.compile(r"\b(extern\s+|static\s+|volatile\s+)*__shared__\b([^;]*);")
ALIGNMENT = re.compile(r"(?:__attribute__\s*\(\(\s*aligned|alignas)\s*\(([^()]*)\)(?:\s*\)\))?")
DECLARATOR = re.compile(r"^(.*?)(\w+)\s*((?:\[[^\]]*\]\s*)*)$", re.DOTALL)
GLOBAL = re.compile(r"\b__global__\b")
MARKER = re.compile(r'^# (\d+) "([^"]*)"((?: \d)*)$')
ASSEMBLY = re.compile(r"\b(?:asm|__asm__)\b\s*(?:volatile|__volatile__)?\s*\(")


class CompilationError(RuntimeError):
    """Raised if the source does not compile for the simulator; contains the compiler's message."""


def translate(text: str, source: str) -> str:
    """The preprocessed source as C++.

    Raises
    ------
    CompilationError
        for inline PTX, or for a declaration that can not be parsed.
    """
    for line, code in _source_lines(text, source):
        if ASSEMBLY.search(code):
            raise CompilationError(
                f"line {line} has inline PTX, which is not simulated: use plain C++ "
                "instead with #ifdef PRECONDATTN_SIMULATED"
            )
    return GLOBAL.sub("", SHARED.sub(_declaration, text))


def plain_kernels(text: str, source: str) -> list[str]:
    """The names of kernels with C linkage, which need no name expression."""
    text = "\n".join(code for _, code in _source_lines(text, source))
    in_block = re.search(r'extern\s+"C"\s*\{', text) is not None
    names = []
    for found in GLOBAL.finditer(text):
        before = text[: found.start()].rstrip()
        if not re.search(r'extern\s+"C"$', before) and (not in_block or before.endswith(">")):
            continue
        named = re.match(r"[^({;]*?(\w+)\s*\(", text[found.end() :])
        if named:
            names.append(named[1])
    return list(dict.fromkeys(names))


def _source_lines(text: str, source: str) -> Iterator[tuple[int, str]]:
    """The number and text of each line that does not come from a system header."""
    has_begun, is_source, number = False, False, 0
    for line in text.split("\n"):
        if marker := MARKER.match(line):
            number = int(marker[1])
            has_begun = has_begun or marker[2] == source
            is_source = has_begun and "3" not in marker[3].split()
            continue
        if is_source:
            yield number, line
        number += 1


def _declaration(found: re.Match[str]) -> str:
    before, rest = found[0].partition("__shared__")[0], found[2]
    rest, end = _without_markers(rest)
    is_dynamic = "extern" in before
    volatile = "volatile " if "volatile" in before else ""
    alignments = [alignment.strip() for alignment in ALIGNMENT.findall(rest)]
    parts = list(_parts(ALIGNMENT.sub(" ", rest)))
    first = DECLARATOR.match(parts[0].strip())
    if first is None or not first[1].strip() or "=" in rest:
        raise CompilationError(f"a declaration in shared memory is not understood: {found[0]}")
    kind = volatile + " ".join(first[1].split())
    declared = []
    for part in [first[2] + first[3], *parts[1:]]:
        declarator = DECLARATOR.match(part.strip())
        if declarator is None or declarator[1].strip():
            raise CompilationError(f"a declaration in shared memory is not understood: {found[0]}")
        name, sizes = declarator[2], " ".join(declarator[3].split())
        least = alignments[0] if alignments else f"alignof({kind})"
        if is_dynamic:
            declared.append(
                f"{kind}* {name} = ({kind}*)::simulated::dynamic_shared_memory({least});"
            )
            continue
        declared.append(
            f"typedef {kind} {name}_type{sizes}; static ::simulated::SharedVariable {name}_place; "
            f"{name}_type& {name} = *({name}_type*)::simulated::shared_variable("
            f'&{name}_place, sizeof({name}_type), {least}, "{name}");'
        )
    return " ".join(declared) + end


def _without_markers(text: str) -> tuple[str, str]:
    """The text on one line, and an ending that keeps later line numbers right.

    The preprocessor marks where a macro of a system header begins and ends.
    """
    lines = text.split("\n")
    marked = [i for i, line in enumerate(lines) if MARKER.match(line)]
    if not marked:
        return " ".join(lines), "\n" * (len(lines) - 1)
    last = MARKER.match(lines[marked[-1]])
    assert last is not None
    number = int(last[1]) + len(lines) - 2 - marked[-1]
    kept = " ".join(line for line in lines if not MARKER.match(line))
    return kept, f'\n# {number} "{last[2]}"{last[3]}\n'


def _parts(text: str) -> Iterator[str]:
    """Split the text at commas outside of brackets."""
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "<([{") - (letter in ">)]}")
        if letter == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]

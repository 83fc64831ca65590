"""Write `precondattn/shorthands.pyi`: the parameters of the shorthands, for type checkers.

python docs/make_shorthands.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import precondattn as pa
from precondattn.algebra import registry

STUB = Path(pa.__file__).with_name("shorthands.pyi")

HEAD = '''\
"""The parameters of the shorthands, which `docs/make_shorthands.py` writes from the declarations.

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
    made = (_function(name, getattr(pa, name)) for name in names)
    functions = "\n\n".join("\n".join(lines) for lines in made)
    return f"{HEAD}__all__ = [\n{listed}]\n\n{functions}\n"


def _function(name: str, function: object) -> Iterator[str]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    yield f"def {name}("
    by_position = True
    for parameter in signature.parameters.values():
        if by_position and parameter.kind is parameter.KEYWORD_ONLY:
            by_position = False
            yield "    *,"
        default = "" if parameter.default is parameter.empty else f" = {_text(parameter.default)}"
        yield f"    {parameter.name}: {parameter.annotation}{default},"
    yield f") -> {signature.return_annotation}:"
    first, *rest = (function.__doc__ or "").splitlines()
    yield f'    """{first}'
    yield from (f"    {line}" if line else "" for line in rest)
    yield '    """'


def _text(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value).replace("'", '"')


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")

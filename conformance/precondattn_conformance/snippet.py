"""Python code that reproduces a failure, for a kernel author to paste.

It runs the whole check, then the check's call on the same inputs, so that they can be inspected in
a debugger. For a plain call it prints the worst element beside the oracle's. As a script, it ends
with an AssertionError as long as the check fails.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.checks import CHECK
from precondattn_conformance.checks.check import VJP, Backend, Check, names_of
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.libraries import named

GRADIENT = re.compile(r"(vjp|autograd) of (\w+)")
MODULES = ("jax", "precondattn", "torch")


def snippet(
    case: Case,
    backend: Backend,
    device: str | None = None,
    error: DisagreementError | None = None,
) -> str:
    """Code that runs the case, and its call."""
    check = CHECK[case.check]
    chosen = _text(backend)
    where = f", device={device!r}" if device else ""
    call = _call(check, case, error).format(
        backend=chosen,
        where=where,
        dtype=case.dtype,
        device=repr((device or "cpu").partition(":")[0]),
        compiled="jax.jit" if case.library == "jax" else "torch.compile",
        eagerly="" if case.library == "jax" else ', backend="aot_eager"',
        listed=chosen.strip("()"),
    )
    helpers = [n for n in ("cache_of", "call_of", "expected_of") if f"{n}(" in call]
    names = ", ".join(sorted({*helpers, "call_of", "replay"}))
    return (
        f"{_imports(case, call)}from precondattn_conformance import {names}\n"
        f"{_registered(backend)}\n"
        f"case = {case.id!r}\n"
        f"outcome = replay(case, backend={chosen}{where})  # The whole check.\n"
        f"print(outcome)\n\n"
        f"mechanism, inputs = call_of(case{where})  # Only its call.\n"
        f"{call}\n\n"
        f'assert outcome.startswith("passed")\n'
    )


def _registered(backend: Backend) -> str:
    """Code that registers the backend under test, if it was made from a function."""
    found = next((b for b in discover().backends if b.name in names_of(backend)[:1]), None)
    code = getattr(found, "registered_by", "")
    return f"from precondattn import register_backend\n{code}" if code else ""


def after(
    code: str, case: Case, earlier: Sequence[str], backend: Backend, device: str | None = None
) -> str:
    """The code of a case, preceded by the earlier cases on which its failure depends."""
    if not earlier:
        return code
    ids = "".join(f"    {text!r},\n" for text in earlier)
    where = f", device={device!r}" if device else ""
    first = f"case = {case.id!r}\n"
    loop = (
        f"for earlier in (  # The case fails only after these.\n{ids}):\n"
        f"    replay(earlier, backend={_text(backend)}{where})\n\n"
    )
    return code.replace(first, loop + first, 1)


def _text(backend: Backend) -> str:
    """The backends as code: a name, a tuple of names, or None."""
    if isinstance(backend, str) or backend is None:
        return repr(backend)
    return repr(backend[0] if len(backend) == 1 else tuple(backend))


def _imports(case: Case, call: str) -> str:
    """Imports for the call, and settings that a case needs before it starts."""
    lines = []
    if case.check == "sharding":
        flags = "--xla_force_host_platform_device_count=4"
        lines += ["import os", "", f'os.environ.setdefault("XLA_FLAGS", "{flags}")', ""]
    needs_float64 = case.library == "jax" and case.dtype == "float64"
    lines += [
        f"import {module}"
        for module in MODULES
        if f"{module}." in call or (module == "jax" and needs_float64)
    ]
    if needs_float64:
        lines += ["", 'jax.config.update("jax_enable_x64", True)']
    return "\n".join([*lines, ""]) + "\n" if lines else ""


def _call(check: Check, case: Case, error: DisagreementError | None) -> str:
    """Code of the check's call; for a plain call, with its worst element beside the oracle's."""
    if not check.is_plain or error is None or not error.what:
        return check.snippet
    lines = ["expected = expected_of(case{where})  # By the oracle, in float64."]
    found, right = "out", "expected.out"
    code = VJP if "vjp" in error.what else Check.snippet
    gradient = GRADIENT.search(error.what)
    if gradient is not None:
        by, name = gradient.groups()
        found, right = f"gradients[{name!r}]", f"expected.gradients[{name!r}]"
        if by == "autograd":
            code = named(case.library).autograd.replace("NAME", name)
    lines.append(code.replace("expected_of(case{where})", "expected"))
    index = f"[{', '.join(map(str, error.index))}]" if error.index else ""
    return "\n".join([*lines, f"print({found}{index}, {right}{index})  # The worst element."])

"""Names for the objects of Triton and JAX, whose own types a checker does not see."""

from __future__ import annotations

from typing import Any

KernelFunction = Any
"""What `triton.jit` returned."""
Global = Any
"""A global that a kernel names: a function, a module or a constant."""
CompiledKernel = Any
"""What `triton.compile` returned, with its assembly in `asm`."""
Target = Any
"""A `GPUTarget` of Triton's."""
Launchable = Any
"""Something to launch: a `JITFunction`, or the interpreter's `GridExecutor`."""
Interpreter = Any
"""A module, or a part, of an interpreter of kernels."""
Handle = Any
"""A block of pointers or of values in Triton's interpreter."""
ElementType = Any
"""A type of Triton's, such as `tl.bfloat16`."""
Argument = Any
"""What a kernel is launched with: a tensor, a number, a flag, a type."""
Operation = Any
"""An operation of MLIR, or a module of them."""

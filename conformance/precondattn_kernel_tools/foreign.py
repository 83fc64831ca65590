"""Type aliases for objects of Triton and JAX, whose own types a type checker does not see."""

from __future__ import annotations

from typing import Any

KernelFunction = Any
"""The result of `triton.jit`."""
Global = Any
"""A global that a kernel uses: a function, a module or a constant."""
CompiledKernel = Any
"""The result of `triton.compile`, with its assembly in `asm`."""
Target = Any
"""A `GPUTarget` of Triton."""
Launchable = Any
"""An object that can be launched: a `JITFunction`, or the interpreter's `GridExecutor`."""
Interpreter = Any
"""An interpreter of kernels, a module or a part of it."""
Handle = Any
"""A block of pointers or of values in Triton's interpreter."""
BlockShape = Any
"""The sizes of a block, or their product, as numbers or as constants of Triton's."""
ElementType = Any
"""A Triton dtype, such as `tl.bfloat16`."""
Argument = Any
"""An argument of a launch: a tensor, a number, a flag, a type."""
Operation = Any
"""An MLIR operation or module."""

"""A backend with one kernel: causal softmax by blocks of keys, in NumPy and in CUDA text."""

import precondattn as pa
from blocked_kernel.blocked import attention


class BlockedKernel(pa.Backend):
    name = "blocked_kernel"
    libraries = frozenset({"numpy"})

    def supports(self, mechanism, request):
        if mechanism != pa.Softmax() or request.verb != "forward" or request.masks:
            return pa.Support.no("runs plain softmax forward")
        return pa.Support.yes()

    def forward(self, mechanism, inputs, frame):
        return attention(*(inputs[name] for name in "qkv")), ()

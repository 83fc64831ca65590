"""Models of flash-linear-attention (`fla.models`), whose Triton kernels need a GPU.

`recurrences.py` has the recurrences by this library, on any device. On a CPU the other modules of
these models are kernels as well: `modules.py`, `convolution.py` and `rotary.py` have them in plain
PyTorch.
"""

"""A device of PyTorch without memory and arithmetic, to see what a call asks of the host.

    device = install()
    q = torch.empty(1, 8192, 16, 128, device=device)

`absent_gpu` also lets Triton launch kernels there, and `call_counts` counts what a call launches.

PyTorch dispatches to it as to a GPU (`device.cpp`). Tensors of any size cost nothing, and a call on
them takes the time of the host alone: that of Python and of PyTorch's dispatcher. What a CUDA graph
can not capture is an error here: reading an entry on the host, a result whose shape depends on
entries, and a copy between the host's memory and the device.

A process that has installed the device keeps it, and PyTorch takes it for the accelerator: call
`install` in a process of its own.
"""

from precondattn_kernel_tools.absent_device.install import NAME, install

__all__ = ["NAME", "install"]

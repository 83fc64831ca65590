"""PyTorch: its tensors, and calls on them: autograd, compilers, transforms, several devices."""

"""Calls on PyTorch tensors: autograd, compilers, transforms, and tensors on several devices."""

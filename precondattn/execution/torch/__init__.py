"""Calls of PyTorch: its autograd, its compiler, its transforms, and tensors on many devices."""

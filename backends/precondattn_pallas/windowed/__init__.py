"""Softmax within the windows of a grid of tokens."""

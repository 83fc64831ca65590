"""Softmax attention and LASER, in tiles."""

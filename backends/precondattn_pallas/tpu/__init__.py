"""Kernels for a TPU: LUCID's solve, the recurrence in chunks, and the gradients of both.

A TPU core runs the programs of a grid one after the other, and keeps scratch memory between them.
So what a GPU splits into several launches is one kernel here: its grid iterates over the blocks of
a sequence in order, and scratch memory holds what the next block needs.
"""

"""Kernels for a TPU: LUCID's solve and its gradient, and the recurrence in chunks and its own.

A TPU's core runs the programs of a grid one after the other, and keeps scratch from one to the
next. So what a GPU splits into launches is one kernel here, whose grid goes over the blocks of a
sequence in order, with what the next block needs in scratch.
"""

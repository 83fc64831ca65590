"""Dispatch: the choice of backends for the leaf calls of a program."""

"""LUCID's triangular solve, its gradient, and its step of one token."""

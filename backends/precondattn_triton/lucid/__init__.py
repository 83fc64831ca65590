"""LUCID's triangular solve, its gradient, and its step by one token."""

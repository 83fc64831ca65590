"""Dispatch: which backend computes which leaf calls, and why not the others."""

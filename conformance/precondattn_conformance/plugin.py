"""Inert for now."""

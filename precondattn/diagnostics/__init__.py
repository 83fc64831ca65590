"""Measurements of how mechanisms relate, to be made on a user's own arrays."""

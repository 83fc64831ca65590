"""Diagnostics: quantities that show, on a user's own arrays, whether a mechanism may help."""

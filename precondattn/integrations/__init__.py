"""Mechanisms in the models of other libraries: a folder for each library, and an extra of its name.

Nothing here is imported by `import precondattn`.
"""

"""Mechanisms in the models of other libraries, with a folder and an extra for each library.

`import precondattn` imports none of them.
"""

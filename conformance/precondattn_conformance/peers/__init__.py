"""Public implementations of the mechanisms by project; each peer is a short adapter of a function.

    precondattn conformance --peer fla/kda_chunk
    peer_named("fla/kda_chunk").backend()

No code of a project is copied. A project is an installed package, or a checkout of its repository
(`files.py`). If it is missing, its peers are *not compared*.
"""

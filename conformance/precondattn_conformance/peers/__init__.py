"""Public implementations of the mechanisms, by project: each peer is a few lines around a function.

    precondattn conformance --peer fla/kda_chunk
    peer_named("fla/kda_chunk").backend()

Nothing of a project is copied. A project is a package that is installed, or a checkout of its
repository (`checkout.py`). What is missing makes its peers *not compared*.
"""

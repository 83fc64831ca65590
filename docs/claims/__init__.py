"""Experiments on the claims of the papers, one module each; `../make_claims.py` runs them."""

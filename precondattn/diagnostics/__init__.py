"""Diagnostics: quantities of a user's arrays that show whether a mechanism may help."""

from precondattn.diagnostics.alignment import alignment, alignment_gap, alignment_hits
from precondattn.diagnostics.conditioning import condition_number, log_mu, mu
from precondattn.diagnostics.covariance import covariance_spectrum
from precondattn.diagnostics.jacobian import jacobian_norms
from precondattn.diagnostics.leverage_scaling import leverage_scaling
from precondattn.diagnostics.lucid_key_jacobian import lucid_key_jacobian
from precondattn.diagnostics.margin import margin_gain
from precondattn.diagnostics.probabilities import probability_histogram
from precondattn.diagnostics.weights import weights

__all__ = [
    "alignment",
    "alignment_gap",
    "alignment_hits",
    "condition_number",
    "covariance_spectrum",
    "jacobian_norms",
    "leverage_scaling",
    "log_mu",
    "lucid_key_jacobian",
    "margin_gain",
    "mu",
    "probability_histogram",
    "weights",
]

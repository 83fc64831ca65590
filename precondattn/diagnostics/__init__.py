"""Diagnostics: quantities of a user's arrays that show whether a mechanism may help."""

from precondattn.diagnostics.alignment import alignment, alignment_gap
from precondattn.diagnostics.conditioning import condition_number, log_mu
from precondattn.diagnostics.covariance import covariance_spectrum
from precondattn.diagnostics.jacobian import jacobian_norms
from precondattn.diagnostics.leverage_scaling import leverage_scaling
from precondattn.diagnostics.margin import margin_gain
from precondattn.diagnostics.weights import weights

__all__ = [
    "alignment",
    "alignment_gap",
    "condition_number",
    "covariance_spectrum",
    "jacobian_norms",
    "leverage_scaling",
    "log_mu",
    "margin_gain",
    "weights",
]

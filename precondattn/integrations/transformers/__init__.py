"""Mechanisms in models of Hugging Face Transformers 5."""

from precondattn.integrations.transformers import interface as interface

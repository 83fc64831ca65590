"""Softmax over tiles of scores: softmax attention with options, and LASER."""

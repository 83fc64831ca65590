"""Softmax over tiles of scores: LASER and differential attention."""

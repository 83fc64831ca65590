"""The recurrence of linear attention and the delta rule in chunks: kernels and launches."""

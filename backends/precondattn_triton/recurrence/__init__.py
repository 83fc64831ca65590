"""The chunkwise recurrence of linear attention and the delta rule: kernels and launches."""

"""The recurrence of linear attention and the delta rule in chunks: launches."""

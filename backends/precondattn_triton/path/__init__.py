"""PaTH: softmax over keys that reflections transport to the query."""

"""JAX: its arrays, and calls on them: derivatives of a backend's methods, several devices."""

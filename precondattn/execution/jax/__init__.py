"""Calls on JAX arrays: derivatives of a backend's methods, and arrays on several devices."""

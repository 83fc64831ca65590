"""Calls of JAX: derivatives of a backend's methods, and arrays on many devices."""

"""Runs bundles: numpy and one backend, never torch."""

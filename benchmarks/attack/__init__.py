"""Attacks on the runtime and the exporter with random hostile input."""

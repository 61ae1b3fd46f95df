"""Measures the speed of a bundle on this machine, compared with one-token mode."""

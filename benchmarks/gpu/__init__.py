"""Measurements on a machine with a GPU."""

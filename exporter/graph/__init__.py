"""Writes the step graph and its weights."""

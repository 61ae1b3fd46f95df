"""Checks that the graph of a bundle computes what its checkpoint does."""

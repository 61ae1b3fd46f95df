"""Replicas of a server on Ray Serve."""

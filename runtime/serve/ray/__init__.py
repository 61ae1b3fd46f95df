"""Replicas of bundles on Ray Serve, and a front that speaks for all of them."""

"""Proof that a bundle works on a device: what must be right, and what it costs."""

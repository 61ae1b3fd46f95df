"""Reads checkpoints of all supported forms as dimensions and tensors."""

"""Readers of checkpoints that others quantized, and of GGUF files."""

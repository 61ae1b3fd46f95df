"""Builds TensorRT engines of the step graph."""

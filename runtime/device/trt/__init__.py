"""The TensorRT backend."""

"""checkpoint -> bundle. The only place that may import torch, transformers and onnx."""

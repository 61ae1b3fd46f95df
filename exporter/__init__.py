"""checkpoint -> bundle. The only place that may import torch, transformers and onnx."""

from mars_export.exporter.checkpoint import Checkpoint, open_checkpoint
from mars_export.exporter.export import ExportOptions, export_onnx
from mars_export.exporter.precision import choose_precision

__all__ = ["Checkpoint", "ExportOptions", "choose_precision", "export_onnx", "open_checkpoint"]

"""Finds the library with the operators of w8a8 layers, and the instruction set that it uses here."""

from ctypes import CDLL, c_char_p
from pathlib import Path

__version__ = "0.1.0"

LIBRARY = Path(__file__).with_name("libmars_export_kernels.so")
PORTABLE = "portable"
OPERATORS = ("QuantizedMatMul", "GroupedMatMul", "LayerStart", "LayerEnd", "Attention")


def instructions() -> str:
    """The instruction set that products are computed with: the one that MARS_EXPORT_KERNELS names if this
    processor has it, else the fastest here; "portable" is slower than ONNX Runtime's own products.
    """
    function = CDLL(str(LIBRARY)).mars_export_kernels_instructions
    function.restype = c_char_p
    name: bytes = function()
    return name.decode()


def get_library_path() -> str:
    """The library, for `SessionOptions.register_custom_ops_library` and other programs with ONNX Runtime."""
    return str(LIBRARY)

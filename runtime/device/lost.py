"""CUDA's errors that stay: "the process must be terminated and relaunched", it says of these, and gives them
to every later call. Knows names, numbers and the words of libraries that pass them on.
"""

from __future__ import annotations

import re

LASTING = {
    "cudaErrorECCUncorrectable": 214,
    "cudaErrorNvlinkUncorrectable": 220,
    "cudaErrorContained": 226,
    "cudaErrorIllegalAddress": 700,
    "cudaErrorLaunchTimeout": 702,
    "cudaErrorAssert": 710,
    "cudaErrorHardwareStackError": 714,
    "cudaErrorIllegalInstruction": 715,
    "cudaErrorMisalignedAddress": 716,
    "cudaErrorInvalidAddressSpace": 717,
    "cudaErrorInvalidPc": 718,
    "cudaErrorLaunchFailure": 719,
    "cudaErrorTensorMemoryLeak": 721,
    "cudaErrorExternalDevice": 911,
}
ADVICE = "; nothing computes on the GPU in this process any more: start it again"
# ONNX Runtime: "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; ..."
_NUMBER = re.compile(r"\bCUDA (?:failure|error) (\d{3})\b")


def is_lasting(words: str) -> bool:
    """Whether a library's error is one of these, by its name or as a number behind CUDA's."""
    numbers = {int(number) for number in _NUMBER.findall(words)}
    return any(name in words or number in numbers for name, number in LASTING.items())


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def advice(error: Exception) -> str:
    """What to do about a step that failed for want of memory; nothing about others."""
    words = str(error).lower()
    is_short = isinstance(error, MemoryError) or any(w in words for w in ("alloc", "out of memory"))
    return (
        "; not enough memory: run fewer rows at once, shorten the prompt, or free memory" if is_short else ""
    )

"""Failures of steps: CUDA errors that end the process, and lack of memory."""

from __future__ import annotations

import re

# CUDA errors after which "the process must be terminated and relaunched": every later call returns them.
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
RESTART = "; this process cannot use the GPU any more: restart it"
# ONNX Runtime: "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; ..."
_NUMBER = re.compile(r"\bCUDA (?:failure|error) (\d{3})\b")


def is_lasting(words: str) -> bool:
    """Whether a library's error message has the name or number of a lasting CUDA error."""
    numbers = {int(number) for number in _NUMBER.findall(words)}
    return any(name in words or number in numbers for name, number in LASTING.items())


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def memory_advice(error: Exception) -> str:
    """The remedy for a step that failed for lack of memory; empty for other errors."""
    words = str(error).lower()
    if not (isinstance(error, MemoryError) or "alloc" in words or "out of memory" in words):
        return ""
    return "; not enough memory: run fewer rows at once, shorten the prompt, or free memory"

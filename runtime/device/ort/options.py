"""What a caller may tell ONNX Runtime itself when a session is opened: pairs by its own names."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import SessionError
from ..name import DeviceName

LEVEL = "session.qdq_matmulnbits_accuracy_level"  # a variant's own; profiles are held against it
GRAPHS = "enable_cuda_graph"


def parted(options: Mapping[str, str], device: DeviceName) -> tuple[dict[str, str], dict[str, str]]:
    """Entries of a session's configuration, whose names have a dot ("session.intra_op.allow_spinning"), and
    options of the execution provider, whose names have none ("device_id", which is the device's number).

    Raises SessionError for what is no text, for provider options on the CPU, which has none, for CUDA graphs,
    for the accuracy level, which is an argument of its own, and for a device_id beside another number.
    """
    wrong = [f"{key!r}: {value!r}" for key, value in options.items() if not _are_texts(key, value)]
    if wrong:
        raise SessionError(f"options are pairs of texts, not {', '.join(wrong)}")
    if GRAPHS in options:
        raise SessionError(
            f"{GRAPHS} is not supported: its first step would be replayed for every other one;"
            " build a TensorRT engine (mars-export trt)"
        )
    if LEVEL in options:
        raise SessionError(f"{LEVEL} is no option: the variant has it, and accuracy_level sets it")
    entries = {key: value for key, value in options.items() if "." in key}
    of_provider = {key: value for key, value in options.items() if "." not in key}
    if of_provider and device.kind == "cpu":
        raise SessionError(
            f"the CPU has no option {', '.join(of_provider)}; names of ONNX Runtime's own have a dot, such as"
            " session.intra_op.allow_spinning"
        )
    if device.number is None:
        return entries, of_provider
    said = of_provider.setdefault("device_id", str(device.number))
    if said != str(device.number):
        raise SessionError(
            f"the device has number {device.number} and device_id is {said[:60]}; say it once, in the device"
        )
    return entries, of_provider


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)

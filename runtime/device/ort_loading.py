"""Sessions of ONNX Runtime: loaded in spite of a directory that is renamed, with captured steps or without,
and what of a graph they leave to the CPU. Names no library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .ort_graphs import ON, OPTION
from .ort_worker import Worker

# What ONNX Runtime says where the directory of a graph was renamed while it was loaded, and how often it is
# believed.
MOVED, MOST_MOVES = "escapes model directory", 5


def load(
    ort: Any,
    graph: Path,
    options: Any,
    provider: str,
    own: Mapping[str, str],
    worker: Worker,
    obstacle: str | None = None,
) -> tuple[Any, bool, str | None]:
    """A session, whether it captures steps, and why not although `own`, the provider's options, asks for it.

    One that captures is loaded in the worker's thread. It is loaded without where there is an `obstacle`, or
    where ONNX Runtime refuses: a graph with control flow, or one of which a part runs elsewhere.
    """
    rest = {name: value for name, value in own.items() if name != OPTION}
    if own.get(OPTION) not in ON:
        return _loaded(ort, graph, options, (provider, own)), False, None
    if obstacle is None:
        try:
            return worker.run(partial(_loaded, ort, graph, options, (provider, own))), True, None
        except Exception as refusal:  # onnxruntime raises its own classes, and plain RuntimeError
            obstacle = first_line(refusal)
    return _loaded(ort, graph, options, (provider, rest)), False, obstacle


def _loaded(ort: Any, graph: Path, options: Any, provider: tuple[str, Mapping[str, str]]) -> Any:
    """A session. One that failed because the graph's directory got another name meanwhile is tried again: it
    is the same directory, and ONNX Runtime compares names. Its fallback to the CPU is off: it prints to the
    standard output, and tries the same again.
    """
    providers = [(provider[0], dict(provider[1]))]
    for _ in range(MOST_MOVES):
        try:
            return ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)
        except Exception as error:
            if MOVED not in str(error):
                raise
    return ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)


def on_cpu(session: Any, provider: str) -> dict[str, int]:
    """Operator -> how many nodes of a session's graph run elsewhere than on `provider`."""
    parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != provider]
    return dict(Counter(node.op_type for part in parts for node in part.get_nodes()).most_common())


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def advice(error: Exception) -> str:
    """What to do about a step that failed for want of memory; nothing about others."""
    words = str(error).lower()
    is_short = isinstance(error, MemoryError) or any(w in words for w in ("alloc", "out of memory"))
    return (
        "; not enough memory: run fewer rows at once, shorten the prompt, or free memory" if is_short else ""
    )

"""KV entries of a prompt's beginning, computed as every row's are and stored in the bundle. Knows no
command.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import takewhile
from time import perf_counter
from typing import Any

import numpy as np

from . import machine
from .bundle.prefixes import Made, check_name, store
from .bundle.profiles import sha256_of
from .bundle.stored import StoredPrefix
from .decode.config import GenerationConfig
from .decode.prefix import Prefixes
from .decode.row import Row
from .decode.schedule import Limits, Schedule, run
from .device.name import DeviceName
from .errors import SessionError
from .session import Session
from .text import Message
from .warm import written

# A user's next words, to see where the tokens before them end: a word, white space, a digit, nothing.
PROBES = ("a", " a", "\n", "1", "é", "", "<")
# Pieces that are read unless somebody asks for others: those of a stream, and of a Batcher.
SIZES = (Limits.of_rows(1).prefill_tokens, Limits().prefill_tokens)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Messages that prompts begin with, and functions (JSON text) that they may tell of."""

    messages: Sequence[Message]
    tools: str | None = None

    @classmethod
    def of_system(cls, text: str, tools: str | None = None) -> Beginning:
        return cls([{"role": "system", "content": text}], tools)

    @classmethod
    def of_json(cls, text: str, where: str, tools: str | None = None) -> Beginning:
        """From a JSON list of messages. Raises SessionError."""
        try:
            messages = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SessionError(
                f"{where}: not JSON ({error}); a list of {{role, content}} is expected"
            ) from error
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            raise SessionError(f"{where}: a list of {{role, content}} is expected")
        return cls(messages, tools)

    def ids(self, session: Session) -> list[int]:
        """What all prompts have in common that begin so: up to the user's words, or to the answer."""
        if self.messages and self.messages[-1].get("role") == "user":
            return session.encode(self.messages, tools=self.tools)
        prompts = [
            session.encode([*self.messages, {"role": "user", "content": probe}], tools=self.tools)
            for probe in PROBES
        ]
        alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=False))
        return [ids[0] for ids in alike]


def make(
    session: Session,
    name: str,
    ids: Sequence[int],
    evidence: Mapping[str, Any] | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[StoredPrefix]:
    """Read `ids` and store their entries in the session's bundle under `name`.

    `sizes`: of the pieces that prompts are read in, `prefill_tokens` of a Batcher; where entries depend on
    them, one prefix is stored for each. Raises SessionError for what cannot be stored, BundleError where the
    bundle cannot be written.
    """
    check_name(name)
    backend = session.backend
    if len(ids) + max(1, backend.firm_slots or 1) > backend.max_capacity:
        raise SessionError(
            f"the beginning has {len(ids)} tokens, this bundle's context holds {backend.max_capacity}: there"
            " is no room for a question; shorten it"
        )
    sizes = sorted({min(size, backend.max_slots or size) for size in sizes})
    if backend.firm_slots is not None:
        sizes = sizes[-1:]
    elif len(ids) < sizes[0]:
        raise SessionError(
            f"the beginning has {len(ids)} tokens; {session.variant.name} keeps whole pieces of"
            f" {sizes[0]} tokens only: there is nothing to store"
        )
    made = [_made(session, name, ids, size, evidence or {}) for size in sizes if _whole(session, ids, size)]
    store(session.bundle.path, made)
    return [prefix for prefix, _ in made]


def _whole(session: Session, ids: Sequence[int], size: int) -> int:
    """How many of the ids are stored."""
    return len(ids) if session.backend.firm_slots is not None else len(ids) // size * size


def _made(session: Session, name: str, ids: Sequence[int], size: int, evidence: Mapping[str, Any]) -> Made:
    begun = perf_counter()
    length = _whole(session, ids, size)
    arrays = read_entries(session, ids[:length], size)
    manifest, variant = session.bundle.manifest, session.variant
    file, content = written(ids[:length], arrays, variant.kv_dtype)
    graph = sha256_of(manifest, variant.file)
    assert graph is not None, "the manifest was checked"
    known = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine.processor() or platform.machine(),
        "seconds": round(perf_counter() - begun, 3),
    }
    prefix = StoredPrefix(
        name=name,
        file=file,
        length=length,
        piece=None if session.backend.firm_slots is not None else size,
        variant=variant.name,
        variant_sha256=graph,
        weights_sha256=sha256_of(manifest, variant.weights),
        precision=variant.precision,
        kv_dtype=variant.kv_dtype,
        kv_layout=variant.kv_layout,
        device=DeviceName.of(session.device).kind,
        accuracy_level=variant.accuracy_level,
        evidence={**evidence, **known},
    )
    return prefix, content


def read_entries(session: Session, ids: Sequence[int], size: int) -> list[np.ndarray]:
    """The entries of `ids`, [kv_heads, length, head_dim] of each KV tensor in turn: read by pieces of `size`
    as every row reads them, and taken where a row's would be saved.
    """
    backend, manifest = session.backend, session.bundle.manifest
    prefixes = Prefixes(1 << 62, backend.firm_slots)
    # What is read behind them lets all of them end in whole pieces, or in steps that are wide enough.
    behind = [ids[-1]] * max(1, backend.firm_slots or 1)
    config = GenerationConfig(tau=1.0, max_new_tokens=1, eos_ids=(), window="full")
    row = Row(0, [*ids, *behind], config, (), stem=prefixes.stem())
    limits = Limits(1, prefill_tokens=size)
    for events in run(Schedule(backend, manifest.block, manifest.tokens.mask, limits), [row]):
        for event in events:
            if event.error is not None:
                raise event.error
    found = prefixes.match(("", 1 if backend.firm_slots is not None else size), ids)
    if found is None or found[1] < len(ids):
        raise SessionError(
            f"{'none' if found is None else found[1]} of {len(ids)} tokens could be copied from the device;"
            " free memory and try again"
        )
    arrays = backend.new_cache(1).fetch(found[0].data)
    return [array[:, : len(ids)] for array in arrays]

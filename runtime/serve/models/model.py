"""A bundle that requests can name, whether it is open or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import time
from typing import Any

from ...bundle.manifest import Variant
from ...bundle.open import Bundle, open_bundle
from ...bundle.profiles import staleness
from ...device.variants import choose
from ...session.session import Session
from .open_model import OpenModel


@dataclass(frozen=True, slots=True)
class Unopened:
    """A bundle that is opened when a request names it, and the variant that will run."""

    bundle: Bundle
    variant: Variant
    open: Callable[[], Session]


def read_bundles(paths: Mapping[str, str | Path], **settings: Any) -> dict[str, Session | Unopened]:
    """Bundles by model name, with the settings of Session.open. A single one is opened at once, several for
    their first requests. Raises BundleError and SessionError.
    """
    if len(paths) == 1:
        return {name: Session.open(path, **settings) for name, path in paths.items()}
    bundles: dict[str, Session | Unopened] = {}
    device, variant = settings.get("device", "cpu"), settings.get("variant")
    for name, path in paths.items():
        bundle = open_bundle(path, safe=settings.get("safe", False))
        choice = choose(bundle, device) if variant is None else bundle.variant(variant)
        bundles[name] = Unopened(bundle, choice, partial(Session.open, path, **settings))
    return bundles


class Model:
    """A name and a bundle.

    opened: its session and batcher, while it is open
    used: number of its last use, in the order of all uses
    state: loaded, loading, failed (at the last attempt) or unloaded
    """

    def __init__(self, name: str, source: Session | Unopened) -> None:
        self.name, self.source = name, source
        self.opened: OpenModel | None = None
        self.used = 0
        self.state = "unloaded"
        self._created = int(time())
        manifest = source.bundle.manifest
        self.profiles = [p.name for p in manifest.profiles if not staleness(manifest, source.variant, p)]

    @property
    def names(self) -> list[str]:
        return [self.name, *(f"{self.name}:{profile}" for profile in self.profiles)]

    @property
    def num_bytes(self) -> int:
        """The size of the graph and the weights."""
        variant = self.source.variant
        files = self.source.bundle.manifest.files
        return sum(entry.size for entry in files if entry.path in (variant.file, variant.weights))

    @property
    def can_close(self) -> bool:
        """Whether it is open, no request uses it, and it can be opened again."""
        return self.opened is not None and not self.opened.users and isinstance(self.source, Unopened)

    def entries(self) -> list[dict[str, Any]]:
        """Its entries in /v1/models: its name, and its name with each valid profile."""
        return [self.entry(name) for name in self.names]

    def entry(self, name: str) -> dict[str, Any]:
        manifest, variant, opened = self.source.bundle.manifest, self.source.variant, self.opened
        text, outputs = manifest.text, set(variant.outputs)
        is_structured = text is not None and bool({"logits", "topk_ids"} & outputs)
        mars = {
            "state": self.state,
            "block": manifest.block,
            "precision": variant.precision,
            "batch_invariant": variant.is_batch_invariant,
            "context": opened.context if opened is not None else manifest.model.context_length,
            "profiles": self.profiles,
            "sampling": "logits" in outputs,
            "structured": is_structured,
            "json_schema": is_structured,
            "tools": is_structured and text is not None and text.chat_template is not None,
            "thinking": text is not None and text.thinking is not None,
            "logprobs": True,
            "variant": variant.name,
            "backend": variant.backend,
            "adaptive": list(opened.levels) if opened is not None else [],
        }
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "mars-export", "mars": mars,
        }  # fmt: skip

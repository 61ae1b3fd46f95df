"""KV entries of prompts' beginnings kept in a bundle: described, checked against what is running, stored,
removed. Knows no session and no text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import BundleError, SessionError
from .files import describe, write_whole
from .kept import delete, exchange
from .manifest import Manifest, Variant
from .open import changing, open_bundle
from .profiles import sha256_of, shown
from .stored import FILE, NAME, StoredPrefix

Made = tuple[StoredPrefix, bytes]
"""What the manifest says of a prefix, and the content of its file."""


def check_name(name: str) -> None:
    """Raise SessionError for what cannot be a prefix's name."""
    if NAME.fullmatch(name) is None:
        raise SessionError(
            "a prefix is named with letters, digits, dots, dashes and underscores, 64 at most, not"
            f" {name[:80]!r}"
        )


def is_for(prefix: StoredPrefix, variant: Variant, device: str) -> bool:
    """Whether a prefix was made for what runs; one for another variant or device is not stale, only not
    meant.
    """
    return (prefix.variant, prefix.device) == (variant.name, device)


def staleness(manifest: Manifest, variant: Variant, prefix: StoredPrefix) -> list[str]:
    """Why a prefix does not hold what `variant`, as it runs, would compute; empty for a good one."""
    reasons = []
    if prefix.variant_sha256 != sha256_of(manifest, variant.file):
        reasons.append(f"{variant.file} is not the one that computed it")
    if prefix.weights_sha256 != sha256_of(manifest, variant.weights):
        reasons.append("the weights are not those that computed it")
    for what in ("precision", "kv_dtype", "kv_layout", "accuracy_level"):
        had, has = getattr(prefix, what), getattr(variant, what)
        if had != has:
            reasons.append(f"its {what.replace('_', ' ')} is {shown(had)}, {shown(has)} is running")
    return reasons


def renewal(bundle: Path, prefix: StoredPrefix, variants: int = 1) -> str:
    """The command that makes the same prefix again; files are named as they were given, without their
    folder.
    """
    words = ["mars-export", "prefix", str(bundle)]
    for option in ("system", "messages", "tools"):
        if (file := prefix.evidence.get(option)) is not None:
            words += [f"--{option}", str(file)]
    if not {"--system", "--messages"} & set(words):
        words += ["--system", "FILE"]
    sizes = prefix.evidence.get("prefill_tokens")
    for size in sizes if isinstance(sizes, list) else []:
        words += ["--prefill-tokens", str(size)]
    words += ["--name", prefix.name]
    if prefix.device != "cpu":
        words += ["--device", prefix.device]
    if variants > 1:
        words += ["--variant", prefix.variant]
    return shlex.join(words)


@dataclass(frozen=True, slots=True)
class Described:
    """A prefix with its state: empty `stale` means that it may be used, else `renewal` is the command."""

    prefix: StoredPrefix
    num_bytes: int
    stale: tuple[str, ...]
    renewal: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.prefix) | {"bytes": self.num_bytes, "stale": list(self.stale)}

    @property
    def state(self) -> str:
        return f"stale: {'; '.join(self.stale)}" if self.stale else "good"

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The prefix itself, as name and text; what is not known is left out."""
        fields = {name: value for name, value in asdict(self.prefix).items() if name != "evidence"}
        lines = [(name, shown(value)) for name, value in fields.items() if value is not None]
        return [*lines, ("bytes", shown(self.num_bytes)), ("state", self.state)]

    @property
    def evidence(self) -> list[tuple[str, str]]:
        return [(name, shown(value)) for name, value in self.prefix.evidence.items()]

    @property
    def cells(self) -> tuple[str, ...]:
        """Name, tokens, size, variant, device, pieces, date and state, as text."""
        p = self.prefix
        return (
            p.name,
            str(p.length),
            f"{self.num_bytes / 1e6:.1f} MB",
            p.variant,
            p.device,
            "any" if p.piece is None else str(p.piece),
            shown(p.evidence.get("date", "?")),
            self.state,
        )


def described(path: str | Path, name: str | None = None) -> list[Described]:
    """The prefixes of the bundle at `path`, or those named `name`, each against the variant that it names."""
    bundle = open_bundle(path)
    manifest = bundle.manifest
    sizes = {entry.path: entry.size for entry in manifest.files}
    wanted = [p for p in manifest.prefixes if name in (None, p.name)]
    if name is not None and not wanted:
        raise _unknown(bundle.path, manifest, name)
    return [
        Described(
            p,
            sizes[p.file],
            tuple(staleness(manifest, bundle.variant(p.variant), p)),
            renewal(bundle.path, p, len(manifest.variants)),
        )
        for p in wanted
    ]


def store(path: str | Path, made: Sequence[Made]) -> None:
    """Put prefixes of one name into the bundle at `path`, in place of those for the same variant and device.

    Raises SessionError where the bundle is no longer the one that computed them.
    """
    directory = Path(path).expanduser()
    new = tuple(prefix for prefix, _ in made)
    with changing(directory) as manifest:
        for prefix in new:
            if stale := _changed(manifest, prefix):
                raise SessionError(f"{path} was changed meanwhile: {'; '.join(stale)}; make it again")
        replaced = {(p.name, p.variant, p.device) for p in new}
        others = tuple(p for p in manifest.prefixes if (p.name, p.variant, p.device) not in replaced)
        entries = []
        try:
            for prefix, content in made:
                write_whole(directory / prefix.file, content)
                entries.append(describe(directory / prefix.file))
        except OSError as error:
            delete(directory, (p.file for p in new), manifest, FILE)
            raise BundleError(
                f"{directory}: the prefix cannot be written ({error.strerror}); nothing is damaged"
            ) from error
        exchange(directory, manifest, replace(manifest, prefixes=(*others, *new)), entries, FILE)


def remove(path: str | Path, name: str) -> int:
    """Take a prefix out of the bundle, for every variant that has it; returns how many there were."""
    directory = Path(path).expanduser()
    with changing(directory) as manifest:
        others = tuple(p for p in manifest.prefixes if p.name != name)
        if len(others) == len(manifest.prefixes):
            raise _unknown(path, manifest, name)
        exchange(directory, manifest, replace(manifest, prefixes=others), [], FILE)
    return len(manifest.prefixes) - len(others)


def _changed(manifest: Manifest, prefix: StoredPrefix) -> list[str]:
    variant = next((v for v in manifest.variants if v.name == prefix.variant), None)
    if variant is None:
        return [f"variant {prefix.variant} is gone"]
    running = replace(variant, accuracy_level=prefix.accuracy_level)  # as it was asked for
    return staleness(manifest, running, prefix)


def _unknown(path: str | Path, manifest: Manifest, name: str) -> SessionError:
    known = ", ".join(sorted({p.name for p in manifest.prefixes})) or "none"
    return SessionError(f"{path}: no prefix `{name}` (there are: {known}); `mars-export prefix` makes one")

"""The profiles of a bundle: reading, checking, storing and removing calibrated settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import SessionError
from .manifest import Manifest, Profile, Variant
from .open import Bundle, open_bundle, rewrite


def sha256_of(manifest: Manifest, file: str | None) -> str | None:
    """The hash that the manifest lists for one of its files."""
    return next((entry.sha256 for entry in manifest.files if entry.path == file), None)


def find(bundle: Bundle, variant: Variant, name: str) -> Profile:
    """The profile `name` for the running variant.

    Raises SessionError, with the remedy, if there is none or if it is stale.
    """
    named = [p for p in bundle.manifest.profiles if p.name == name]
    if not named:
        raise _unknown(bundle.path, bundle.manifest, name)
    profile = next((p for p in named if p.variant == variant.name), named[0])
    if reasons := staleness(bundle.manifest, variant, profile):
        raise SessionError(
            f"profile `{name}` is stale: {'; '.join(reasons)}."
            f" Renew it with:\n  {renewal(bundle.path, profile)}"
        )
    return profile


def staleness(manifest: Manifest, variant: Variant, profile: Profile) -> list[str]:
    """Why a profile does not apply to `variant` of this bundle; empty if it applies."""
    if profile.variant != variant.name:
        return [f"it was calibrated on variant {profile.variant}, but {variant.name} is running"]
    reasons = []
    if profile.variant_sha256 != sha256_of(manifest, variant.file):
        reasons.append(f"the graph {variant.file} is not the one it was calibrated on")
    if profile.weights_sha256 is not None and profile.weights_sha256 != sha256_of(manifest, variant.weights):
        reasons.append("the weights are not those it was calibrated on")
    if profile.precision is not None and profile.precision != variant.precision:
        reasons.append(f"it was calibrated in {profile.precision}, but {variant.precision} is running")
    if profile.accuracy_level != variant.accuracy_level:
        reasons.append(
            f"it was calibrated at accuracy level {profile.accuracy_level},"
            f" but {variant.accuracy_level} is running"
        )
    return reasons


def renewal(bundle: Path, profile: Profile) -> str:
    """The command that measures the profile again. The evidence has the task's file without its folder."""
    task, drop = profile.evidence.get("task", "TASK.jsonl"), profile.evidence.get("max_drop", 0.02)
    options = ["--task", str(task), "--max-drop", str(drop), "--name", profile.name]
    return shlex.join(["mars-export", "calibrate", str(bundle), *options])


def states(path: str | Path) -> list[dict[str, Any]]:
    """The profiles of the bundle at `path`, each with the reasons why it is `stale` for its own variant."""
    bundle = open_bundle(path)
    manifest = bundle.manifest
    return [
        asdict(p) | {"stale": staleness(manifest, bundle.variant(p.variant), p)} for p in manifest.profiles
    ]


def of_variant(
    manifest: Manifest, variant: Variant, name: str, evidence: Mapping[str, Any], **settings: Any
) -> Profile:
    """A profile with these settings, valid for `variant` as it is now."""
    graph = sha256_of(manifest, variant.file)
    assert graph is not None, "an opened bundle lists its graph"
    return Profile(
        name=name,
        variant=variant.name,
        variant_sha256=graph,
        evidence=evidence,
        weights_sha256=sha256_of(manifest, variant.weights),
        precision=variant.precision,
        accuracy_level=variant.accuracy_level,
        **settings,
    )


def store(path: str | Path, profile: Profile) -> None:
    """Store a profile in the bundle at `path`. It replaces one of the same name for the same variant."""

    def change(manifest: Manifest) -> Manifest:
        others = (p for p in manifest.profiles if (p.name, p.variant) != (profile.name, profile.variant))
        return replace(manifest, profiles=(*others, profile))

    rewrite(path, change)


def remove(path: str | Path, name: str) -> None:
    """Remove a profile from every variant of the bundle. Raises SessionError for an unknown name."""

    def change(manifest: Manifest) -> Manifest:
        others = tuple(p for p in manifest.profiles if p.name != name)
        if len(others) == len(manifest.profiles):
            raise _unknown(path, manifest, name)
        return replace(manifest, profiles=others)

    rewrite(path, change)


def _unknown(path: str | Path, manifest: Manifest, name: str) -> SessionError:
    known = ", ".join(sorted({p.name for p in manifest.profiles})) or "none"
    return SessionError(
        f"{path}: no profile `{name}` (there are: {known}); `mars-export calibrate` makes one"
    )

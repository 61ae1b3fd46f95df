"""Reads manifests of format 1.0 to 1.3: the names that 1.4 changed (docs/format.md, "Versions")."""

from __future__ import annotations

from typing import Any

LAYOUTS = {"static": "in-place", "delta": "appended"}


def upgrade(manifest: dict[str, Any]) -> None:
    """Give the parsed text of an older manifest the names of format 1.4, in place.

    Wrong values stay as they are: the reader reports them.
    """
    for variant in _objects(manifest.get("variants")):
        layout = variant.get("kv_layout")
        if isinstance(layout, str):
            variant["kv_layout"] = LAYOUTS.get(layout, layout)
        drift = variant.get("drift")
        if isinstance(drift, dict) and "yardstick" in drift:
            drift["reference_library"] = drift.pop("yardstick")
    for profile in _objects(manifest.get("profiles")):
        if "window" in profile:  # counted the predictions of a step, one more than its masks
            window = profile.pop("window")
            is_number = isinstance(window, int) and not isinstance(window, bool)
            profile["masks"] = window - 1 if is_number else window


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []

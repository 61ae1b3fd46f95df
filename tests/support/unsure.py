"""A model without weights that is more or less sure."""

from __future__ import annotations


def predict(known: tuple[int, ...], masks: int) -> tuple[int, float]:
    """Depends on all that was seen, and is more or less sure."""
    mixed = hash((known, masks))
    return 1 + mixed % 50, (mixed // 50 % 100) / 100

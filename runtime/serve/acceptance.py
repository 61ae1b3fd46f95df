"""Whether answers with a profile still get the tokens per forward that its calibration measured.

Only profiles are compared: their expectation was measured with the operator's own prompts. An export's
self-check has none to offer, because the task decides how predictable a text is (docs/serving.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..bundle.manifest import Profile
from ..rules import is_number
from .models.models import Models

if TYPE_CHECKING:
    from .responses.admission import Admitted

LOG = logging.getLogger("mars_export.serve")
LEAST_GAIN = 0.2  # tokens per forward above 1: a calibration with less has nothing to lose
PRIOR = 1000.0  # forwards that count as expected before there are any, so that a few requests decide nothing
MOST_OF_REQUEST = 50.0  # forwards that one request counts for
HALF_LIFE = 5000.0  # forwards after which an earlier one counts half
LOW, RECOVERED = 0.5, 0.7


@dataclass(slots=True)
class _Average:
    """A moving average of the tokens of a forward beyond its first; `expected` is that of the calibration."""

    profile: Profile
    expected: float
    gain: float  # sum over forwards
    forwards: float
    is_low: bool = False

    @property
    def ratio(self) -> float:
        return self.gain / self.forwards / self.expected

    def add(self, tokens: int, forwards: int) -> None:
        weight = min(float(forwards), MOST_OF_REQUEST)
        fade = 0.5 ** (weight / HALF_LIFE)
        self.gain = self.gain * fade + weight * (tokens / forwards - 1)
        self.forwards = self.forwards * fade + weight


class AcceptanceMonitor:
    """The averages of all profiles that have an expectation; a warning for each that becomes low."""

    def __init__(self, models: Models) -> None:
        self._averages: dict[tuple[str, str], _Average] = {}
        for name, model in models.models.items():
            for profile in model.source.bundle.manifest.profiles:
                tokens = profile.evidence.get("tokens_per_forward")
                is_valid = profile.name in model.profiles and profile.variant == model.source.variant.name
                if is_valid and is_number(tokens) and (expected := float(tokens) - 1) >= LEAST_GAIN:
                    self._averages[name, profile.name] = _Average(profile, expected, PRIOR * expected, PRIOR)

    def ratios(self) -> Iterator[tuple[str, str, float]]:
        """Of each model and profile: the gain of its answers over one token a forward, divided by that of the
        calibration.
        """
        for (model, profile), average in self._averages.items():
            yield model, profile, average.ratio

    def ended(self, admitted: Admitted) -> None:
        """Count answers that were decoded as in a calibration: greedy and without a grammar."""
        config, key = admitted.config, (admitted.model.name, admitted.profile or "")
        average = self._averages.get(key)
        if average is None or config.host_chooses or config.is_structured or config.prompt_lookup:
            return
        for request in admitted.requests:
            if request.stats.forwards:
                average.add(request.stats.tokens, request.stats.forwards)
        if average.is_low and average.ratio >= RECOVERED:
            average.is_low = False
            LOG.info("%s: profile %s gives the expected tokens per forward again", *key)
        elif not average.is_low and average.ratio < LOW:
            average.is_low = True
            LOG.warning(
                "%s: profile %s gives %.2f tokens per forward, its calibration gave %.2f. Likely causes:"
                " another chat template or system prompt, other prompts than the calibration's, longer"
                " contexts (YaRN). Calibrate again with prompts of today",
                *key,
                1 + average.ratio * average.expected,
                1 + average.expected,
            )

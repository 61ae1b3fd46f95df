"""Metrics for Prometheus, and a warning for profiles that get fewer tokens per forward than calibrated."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..bundle.manifest import Profile
from ..rules import is_number
from .models import Models

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
        """For each model and profile: the gain of its answers over one token a forward, divided by the
        calibration's gain.
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
                " contexts (YaRN). Calibrate again with current prompts",
                *key,
                1 + average.ratio * average.expected,
                1 + average.expected,
            )


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MODEL = ("model",)


class Metrics:
    """The counters and histograms of one server, and gauges that read its batchers at each scrape."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        self._acceptance = AcceptanceMonitor(models)
        self.registry.register(_Gauges(models, self._acceptance))

        def counter(name: str, text: str, labels: tuple[str, ...] = MODEL) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, MODEL, buckets=buckets, registry=self.registry)

        prompt = "Prompt tokens of requests that have ended, cached ones included."
        self._prompt = counter("mars_prompt_tokens", prompt)
        self._generation = counter("mars_generation_tokens", "Generated tokens.")
        self._counters = {
            "draft_tokens": counter("mars_draft_tokens", "Draft tokens."),
            "accepted_draft_tokens": counter(
                "mars_accepted_draft_tokens", "Draft tokens that were accepted."
            ),
            "forced": counter("mars_forced_tokens", "Tokens that a grammar forced."),
            "forwards": counter("mars_forwards", "Forwards of rows, from their first token on."),
        }
        self._requests = counter("mars_requests", "Requests by outcome.", ("model", "outcome"))
        self._first = histogram(
            "mars_time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST
        )
        self._between = histogram(
            "mars_inter_token_latency_seconds", "Seconds of a step divided by its tokens.", BETWEEN
        )
        self._whole = histogram(
            "mars_e2e_request_latency_seconds", "From the arrival of a request to its end.", WHOLE
        )
        self._queue = histogram(
            "mars_request_queue_time_seconds", "From the arrival of a request to its row.", FIRST
        )
        counters = (self._prompt, self._generation, *self._counters.values())
        for metric in (*counters, self._first, self._between, self._whole, self._queue):
            for name in models.models:  # present from the start, so that rates are right
                metric.labels(name)

    def refused(self, model: str, status: int) -> None:
        """Count a request that got an error. `model` is a served bundle, or ""."""
        outcome = "overloaded" if status in (429, 503) else "failed" if status >= 500 else "refused"
        self._requests.labels(model, outcome).inc()

    def step(self, model: str, num_tokens: int, seconds: float | None) -> None:
        """Count an event of a request, `seconds` after its previous one; None for its first."""
        self._generation.labels(model).inc(num_tokens)
        if seconds is not None:
            between = self._between.labels(model)
            for _ in range(num_tokens):
                between.observe(seconds / num_tokens)

    def ended(self, admitted: Admitted, outcome: str, seconds: float) -> None:
        """Count a request that ended `seconds` after its arrival, once for all its answers."""
        name = admitted.model.name
        self._acceptance.ended(admitted)
        self._requests.labels(name, outcome).inc()
        self._whole.labels(name).observe(seconds)
        stats = [request.stats for request in admitted.requests]
        self._prompt.labels(name).inc(sum(s.prompt_tokens for s in stats[:: admitted.api_request.n]))
        for s in stats:
            for key, counter in self._counters.items():
                counter.labels(name).inc(getattr(s, key))
            if s.queue_time:
                self._queue.labels(name).observe(s.queue_time)
            if s.time_to_first_token:
                self._first.labels(name).observe(s.time_to_first_token)

    def text(self) -> bytes:
        return exposition(self.registry.collect())

    def families(self, replica: str) -> list[Metric]:
        """All metrics, with the label `replica`."""
        families = list(self.registry.collect())
        for family in families:
            family.samples = [s._replace(labels={"replica": replica, **s.labels}) for s in family.samples]
        return families


def exposition(metrics: Iterable[Metric]) -> bytes:
    """The page of metrics, without the library's `_created` series. Metrics of the same name become one."""
    families: dict[str, Metric] = {}
    for metric in metrics:
        if (family := families.setdefault(metric.name, metric)) is not metric:
            family.samples += metric.samples
    registry: Any = SimpleNamespace(collect=families.values)
    lines = generate_latest(registry).splitlines(keepends=True)
    return b"".join(line for line in lines if b"_created" not in line.partition(b"{")[0])


class _Gauges(Collector):
    """Values of the batchers, read at each scrape."""

    def __init__(self, models: Models, acceptance: AcceptanceMonitor) -> None:
        self._models, self._acceptance = models, acceptance

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, labels=MODEL)

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(name, text, labels=MODEL)

        loaded = gauge("mars_model_loaded", "1 if the model is open.")
        running = gauge("mars_num_requests_running", "Requests being decoded.")
        waiting = gauge("mars_num_requests_waiting", "Requests waiting to be decoded.")
        usage = gauge("mars_kv_cache_usage_ratio", "Share of the KV memory in use.")
        queries = counter("mars_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        hits = counter("mars_prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        text = "Tokens per forward above 1 of a profile's answers, divided by those of its calibration."
        acceptance = GaugeMetricFamily("mars_acceptance_ratio", text, labels=("model", "profile"))
        for model_name, profile, ratio in self._acceptance.ratios():
            acceptance.add_metric([model_name, profile], ratio)
        for name, model in self._models.models.items():
            batcher = model.opened.batcher if model.opened is not None else None
            loaded.add_metric([name], int(model.opened is not None))
            running.add_metric([name], batcher.num_running if batcher is not None else 0)
            waiting.add_metric([name], batcher.num_waiting if batcher is not None else 0)
            usage.add_metric([name], batcher.kv_usage if batcher is not None else 0)
        for name, opened in self._models.opened.items():
            prefixes = opened.session.prefix_stats
            queries.add_metric([name], prefixes.query_tokens)
            hits.add_metric([name], prefixes.hit_tokens)
        yield from (loaded, running, waiting, usage, queries, hits, acceptance)

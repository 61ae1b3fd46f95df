"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..batcher.request import Request
from ..session.answer import Event
from .models.models import Models
from .models.served import Served

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MODEL = ("model",)


class Metrics:
    """The counters and histograms of one server, and gauges that read its batchers at each scrape."""

    def __init__(self, models: Models) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(models))
        counters = {
            "prompt": (
                "mars_prompt_tokens",
                "Prompt tokens of requests that have ended, cached ones included.",
            ),
            "generation": ("mars_generation_tokens", "Generated tokens."),
            "proposed": ("mars_proposed_tokens", "Proposed tokens."),
            "verified": ("mars_verified_tokens", "Proposed tokens that were verified."),
            "forced": ("mars_forced_tokens", "Tokens that a grammar forced."),
            "forwards": ("mars_forwards", "Forwards of rows, from their first token on."),
        }
        self._counters = {
            key: Counter(name, text, MODEL, registry=self.registry) for key, (name, text) in counters.items()
        }
        self._requests = Counter(
            "mars_requests",
            "Requests by outcome, and by the level of load that chose their settings.",
            ("model", "outcome", "level"),
            registry=self.registry,
        )
        histograms = {
            "first": (
                "mars_time_to_first_token_seconds",
                "From the arrival of a request to its first token.",
                FIRST,
            ),
            "between": (
                "mars_inter_token_latency_seconds",
                "Seconds of a step divided by its tokens.",
                BETWEEN,
            ),
            "whole": ("mars_e2e_request_latency_seconds", "From the arrival of a request to its end.", WHOLE),
            "queue": ("mars_request_queue_time_seconds", "From the arrival of a request to its row.", FIRST),
        }
        self._histograms = {
            key: Histogram(name, text, MODEL, buckets=buckets, registry=self.registry)
            for key, (name, text, buckets) in histograms.items()
        }
        for name in models.models:  # present from the start, so that rates are right
            for metric in (*self._counters.values(), *self._histograms.values()):
                metric.labels(name)

    def refused(self, model: str | None, status: int) -> None:
        """Count a request that got an error. `model` is a served bundle, or None."""
        outcome = "overloaded" if status in (429, 503) else "failed" if status >= 500 else "refused"
        self._requests.labels(model or "", outcome, "").inc()

    def step(self, served: Served, event: Event, seconds: float | None) -> None:
        """Count an event of a request, `seconds` after its previous one; None for its first."""
        number = len(event.token_ids)
        if not number:
            return
        self._counters["generation"].labels(served.name).inc(number)
        if seconds is not None:
            between = self._histograms["between"].labels(served.name)
            for _ in range(number):
                between.observe(seconds / number)

    def ended(
        self, name: str, requests: Sequence[Request], n: int, level: str, outcome: str, seconds: float
    ) -> None:
        """Count what the model `name` was asked, which ended `seconds` after its arrival: `n` requests for
        each prompt.
        """
        self._requests.labels(name, outcome, level).inc()
        self._histograms["whole"].labels(name).observe(seconds)
        for i, request in enumerate(requests):
            stats = request.stats
            if i % n == 0:
                self._counters["prompt"].labels(name).inc(stats.prompt_tokens)
            for key in ("proposed", "verified", "forced", "forwards"):
                self._counters[key].labels(name).inc(getattr(stats, key))
            if stats.queue_time:
                self._histograms["queue"].labels(name).observe(stats.queue_time)
            if stats.time_to_first_token:
                self._histograms["first"].labels(name).observe(stats.time_to_first_token)

    def text(self) -> bytes:
        """The exposition, without the `_created` series that the library adds."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line.partition(b"{")[0])


class _Gauges(Collector):
    """Values of the batchers, read at each scrape."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Any]:
        running = GaugeMetricFamily("mars_num_requests_running", "Requests with a row.", labels=MODEL)
        waiting = GaugeMetricFamily(
            "mars_num_requests_waiting", "Requests that wait for a row.", labels=MODEL
        )
        usage = GaugeMetricFamily("mars_kv_cache_usage_ratio", "Share of the KV memory in use.", labels=MODEL)
        level = GaugeMetricFamily(
            "mars_adaptive_level", "Level of load: 0 is the best setting of the list.", labels=MODEL
        )
        queries = CounterMetricFamily(
            "mars_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", labels=MODEL
        )
        hits = CounterMetricFamily(
            "mars_prefix_cache_hits", "Prompt tokens found in the prefix cache.", labels=MODEL
        )
        loaded = GaugeMetricFamily("mars_model_loaded", "1 if the model is open.", labels=MODEL)
        for name, model in self._models.models.items():
            batcher = model.served.batcher if model.served is not None else None
            loaded.add_metric([name], int(model.served is not None))
            running.add_metric([name], batcher.num_running if batcher is not None else 0)
            waiting.add_metric([name], batcher.num_waiting if batcher is not None else 0)
            usage.add_metric([name], batcher.kv_usage if batcher is not None else 0)
        for name, served in self._models.served.items():
            prefixes = served.session.prefix_stats
            level.add_metric([name], served.choose_level())
            queries.add_metric([name], prefixes.query_tokens)
            hits.add_metric([name], prefixes.hit_tokens)
        yield from (loaded, running, waiting, usage, level, queries, hits)

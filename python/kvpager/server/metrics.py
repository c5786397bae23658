"""Prometheus metrics: vLLM's names under `kvpager:`, and what only this pager has.

Names, labels and buckets are those of vLLM 0.33 (vllm/v1/metrics/loggers.py), so that dashboards
made for it need another prefix alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpager.requests.completion import RequestCompletion

PREFIX = "kvpager:"
RestoreOutcome = Literal["exact", "refused", "damaged", "unknown"]

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Metrics:
    """The metrics of one server. Any thread may use them."""

    def __init__(self, model: str) -> None:
        """`model`: the label `model_name`."""
        self._registry = CollectorRegistry()
        self._reading = threading.Lock()
        self._model = model

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, meaning, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(
                PREFIX + name, meaning, ("model_name",), registry=self._registry, buckets=buckets
            )
            return whole.labels(model)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", _BETWEEN_TOKENS
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From a request to the end of its answer.", _WHOLE
        )
        self._queue = histogram("request_queue_time_seconds", "Waiting for admission.", _WHOLE)
        self._prompt = counter("prompt_tokens", "Tokens of prompts.").labels(model)
        self._cached = counter(
            "prompt_tokens_cached", "Tokens of prompts whose K/V were there."
        ).labels(model)
        self._generated = counter("generation_tokens", "Tokens of answers.").labels(model)
        self._success = counter("request_success", "Answers, by their end.", "finished_reason")
        self._consumed = counter(
            "restored_tokens_consumed", "Restored tokens that replaced a prefill."
        ).labels(model)
        self._restores = counter("restores", "Restores of saved conversations.", "outcome")
        self._damaged = counter(
            "damaged_chunks", "Damaged chunks that were met in snapshots."
        ).labels(model)
        self._recomputed = counter(
            "recomputed_tokens", "Tokens computed again, because their chunks were damaged."
        ).labels(model)
        self._errors = counter("request_errors", "Answers with an error.", "code")

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self._first_token.observe(seconds)

    def token(self, seconds: float) -> None:
        """A further token came so long after the one before it."""
        self._between.observe(seconds)

    def finished(self, completion: RequestCompletion, consumed: int, recomputed: int) -> None:
        """A choice ended.

        consumed: restored tokens that replaced a prefill of its. recomputed: damaged ones.
        """
        self._whole.observe(completion.total_s)
        if completion.queue_s is not None:
            self._queue.observe(completion.queue_s)
        self._prompt.inc(completion.prompt_tokens)
        self._cached.inc(completion.cached_tokens)
        self._generated.inc(len(completion.tokens))
        self._consumed.inc(consumed)
        self._recomputed.inc(recomputed)
        self._success.labels(self._model, completion.finish_reason).inc()

    def restored(self, outcome: RestoreOutcome) -> None:
        """A saved conversation was asked for."""
        self._restores.labels(self._model, outcome).inc()

    def damaged(self) -> None:
        """A damaged chunk was met."""
        self._damaged.inc()

    def error(self, code: int) -> None:
        """A request was answered with an error."""
        self._errors.labels(self._model, str(code)).inc()

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Has `gauges` tell the rest whenever somebody asks."""
        self._watched = _Watched(self._model, gauges)
        self._registry.register(self._watched)

    def text(self, tenants: Collection[str]) -> bytes:
        """All of them, in Prometheus's text format, with the names of these tenants alone."""
        with self._reading:
            self._watched.tenants = tenants
            return generate_latest(self._registry)


@dataclass(frozen=True)
class Gauges:
    """What is so at an instant.

    Attributes:
        running: requests that are admitted.
        waiting: requests that are not.
        usage: share of the pool's blocks that is taken, 0 to 1.
        tiers: bytes of K/V by tier.
        stores: bytes on disk by tenant.
        sessions: conversations in memory.
    """

    running: int
    waiting: int
    usage: float
    tiers: Mapping[str, int]
    stores: Mapping[str, int]
    sessions: int


class _Watched(Collector):
    def __init__(self, model: str, gauges: Callable[[], Gauges]) -> None:
        self._model = model
        self._gauges = gauges
        self.tenants: Collection[str] = ()

    def describe(self) -> Iterable[Metric]:
        return []  # so that nothing is asked before somebody wants to know

    def collect(self) -> Iterable[Metric]:
        now = self._gauges()
        for name, meaning, value in (
            ("num_requests_running", "Requests that are computed.", now.running),
            ("num_requests_waiting", "Requests that wait.", now.waiting),
            ("kv_cache_usage_perc", "Share of the pool that is taken; 1 is all.", now.usage),
            ("num_sessions_kept", "Conversations in memory.", now.sessions),
        ):
            metric = GaugeMetricFamily(PREFIX + name, meaning, labels=("model_name",))
            metric.add_metric((self._model,), value)
            yield metric
        for name, meaning, label, values in (
            ("bytes", "Bytes of K/V, by tier.", "tier", now.tiers),
            ("store_bytes", "Bytes of a tenant's store.", "tenant", now.stores),
        ):
            metric = GaugeMetricFamily(PREFIX + name, meaning, labels=("model_name", label))
            for key, value in values.items():
                if label == "tenant" and key not in self.tenants:
                    continue
                metric.add_metric((self._model, key), value)
            yield metric

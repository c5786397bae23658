"""Prometheus metrics: vLLM's names under `kvpager:`, and what only this pager has.

Names, labels and buckets are those of vLLM 0.33 (vllm/v1/metrics/loggers.py), so that dashboards
made for it need another prefix alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpager.requests.request import RequestCompletion

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
_WINDOW = 60.0  # seconds that latencies are of
_RATE_WINDOW = 5.0  # and rates


class Recent:
    """Tokens and latencies of the last minute. Used by the event loop."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, str, float]] = deque(maxlen=50_000)

    def note(self, kind: str, value: float) -> None:
        """Records an event of this kind now."""
        self._events.append((time.monotonic(), kind, value))

    def rate(self, kind: str) -> float:
        """The sum of a kind's values, per second."""
        return sum(self._values(kind, _RATE_WINDOW)) / _RATE_WINDOW

    def quantiles(self, kind: str) -> dict[str, float | None]:
        """The median and the 99th percentile of a kind's values; None without any."""
        values = sorted(self._values(kind, _WINDOW))
        if not values:
            return {"p50": None, "p99": None}
        last = len(values) - 1
        return {"p50": values[last // 2], "p99": values[min(last, int(0.99 * len(values)))]}

    def _values(self, kind: str, seconds: float) -> list[float]:
        since = time.monotonic() - seconds
        return [value for at, one, value in self._events if one == kind and at >= since]


class Metrics:
    """The metrics of one server. Any thread may use them, but for `recent` and what it counts.

    Attributes:
        recent: events of the last minute. Used by the event loop.
    """

    def __init__(self, model: str) -> None:
        """`model`: the label `model_name`."""
        self._registry = CollectorRegistry()
        self._reading = threading.Lock()
        self._model = model
        self.recent = Recent()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            names = ("model_name", *labels)
            whole = Counter(PREFIX + name, meaning, names, registry=self._registry)
            return whole if labels else whole.labels(model)

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
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("prompt_tokens_cached", "Tokens of prompts whose K/V were there.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._success = counter("request_success", "Answers, by their end.", "finished_reason")
        self._consumed = counter(
            "restored_tokens_consumed", "Restored tokens that replaced a prefill."
        )
        self._restores = counter("restores", "Restores of saved conversations.", "outcome")
        self._damaged = counter("damaged_chunks", "Damaged chunks that were met in snapshots.")
        self._recomputed = counter(
            "recomputed_tokens", "Tokens computed again, because their chunks were damaged."
        )
        self._errors = counter("request_errors", "Answers with an error.", "code")

    def token(self, seconds: float, *, is_first: bool) -> None:
        """Counts a token, so many seconds after the one before it, or after the request."""
        (self._first_token if is_first else self._between).observe(seconds)
        self.recent.note("first" if is_first else "between", seconds)
        self.recent.note("token", 1)

    def finished(self, completion: RequestCompletion, consumed: int, recomputed: int) -> None:
        """Counts a choice that ended.

        consumed: restored tokens that replaced a prefill. recomputed: tokens of damaged chunks.
        """
        self.recent.note("prompt", completion.computed_tokens)
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
        """Counts a restore of a saved conversation."""
        self._restores.labels(self._model, outcome).inc()

    def damaged(self) -> None:
        """Counts a damaged chunk."""
        self._damaged.inc()

    def error(self, code: int) -> None:
        """Counts a request that was answered with an error."""
        self._errors.labels(self._model, str(code)).inc()

    def watch(self, gauges: Callable[[], Gauges]) -> None:
        """Reads the gauges from this function at each scrape."""
        self._watched = _Watched(self._model, gauges)
        self._registry.register(self._watched)

    def text(self, tenants: Collection[str]) -> bytes:
        """Prometheus's text format of all metrics, with the names of these tenants only."""
        with self._reading:
            self._watched.tenants = tenants
            return generate_latest(self._registry)


@dataclass(frozen=True)
class Gauges:
    """Gauge values at scrape time.

    Attributes:
        running: admitted requests.
        waiting: requests that are not admitted yet.
        usage: used share of the pool's blocks, 0 to 1.
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
        return []  # so that registering reads no gauge

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

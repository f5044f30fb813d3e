"""Numbers of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

#: upper bounds of times in seconds
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters, gauges and times of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("quantmoe_requests", "HTTP requests", ["path", "status"], registry=registry)
        self.running = Gauge("quantmoe_requests_running", "Answers in a row of the cache", registry=registry)
        self.waiting = Gauge("quantmoe_requests_waiting", "Answers that wait for a row", registry=registry)
        self.prompt = Counter("quantmoe_prompt_tokens", "Prompt tokens", registry=registry)
        self.cached = Counter("quantmoe_cached_tokens", "Prompt tokens that were not computed", registry=registry)
        self.generated = Counter("quantmoe_generated_tokens", "Generated tokens", registry=registry)
        self.first = Histogram(
            "quantmoe_time_to_first_token_seconds",
            "From the request to its first token",
            registry=registry,
            buckets=_SECONDS,
        )
        self.step = Histogram("quantmoe_step_seconds", "One token of all answers", registry=registry, buckets=_SECONDS)

    def text(self) -> bytes:
        """Return all of them in Prometheus' format."""
        return generate_latest(self.registry)

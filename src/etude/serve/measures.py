"""What the server counts, in Prometheus' form: GET /metrics.

What it does not do: know the engine's own counters (`engine_lines` asks for them when somebody looks).
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from etude.protocols import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Measures:
    """One server's. Labels hold no text that a client wrote."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = lambda name, text, *labels: Counter(f"etude_{name}", text, labels, registry=self.registry)  # noqa: E731
        self.requests = counter(
            "requests", "Requests that were answered, by endpoint and status.", "endpoint", "status"
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts, windows that go on included.")
        self.reused_tokens = counter("reused_tokens", "Of these, tokens whose KV was not computed again.")
        self.sampled_tokens = counter("sampled_tokens", "Tokens sampled for clients.")
        self.contexts = counter("contexts", "Token windows, by why they were opened.", "opened")
        self.turns = counter("turns", "Turns that went on in a window that was there.")
        self.recorded = counter("recorded_turns", "Turns that the recorder kept.")
        self.cancelled = counter("cancelled_requests", "Requests whose client went away.")
        self.broken_calls = counter("broken_calls", "Replies with a call that could not be read.")
        self.ignored = counter("ignored_options", "Sampling options that were left out.", "option")
        self.forgotten = counter("forgotten_windows", "Windows that made room for others.")
        self.in_flight = Gauge("etude_in_flight", "Requests that are being answered.", registry=self.registry)
        self.windows = Gauge("etude_windows", "Windows that are remembered.", registry=self.registry)
        self.window_tokens = Gauge("etude_window_tokens", "Their tokens.", registry=self.registry)
        self.first_token_s = Histogram(
            "etude_first_token_seconds", "From a request to its first token.", buckets=_SECONDS, registry=self.registry
        )
        self.wall_s = Histogram(
            "etude_turn_seconds", "From a request to the end of its answer.", buckets=_SECONDS, registry=self.registry
        )
        self.record_s = Histogram(
            "etude_record_seconds", "For a turn to be kept.", buckets=_SECONDS, registry=self.registry
        )

    def text(self, engine: EngineStats | None) -> bytes:
        """All of it; with the engine's gauges while it answers."""
        return generate_latest(self.registry) + _engine_lines(engine).encode()


def _engine_lines(stats: EngineStats | None) -> str:
    if stats is None:
        return "# TYPE etude_engine_up gauge\netude_engine_up 0\n"
    rows = {"running": "gauge", "waiting": "gauge", "prefilled_tokens": "counter", "reused_tokens": "counter",
            "stale_reused_tokens": "counter", "sampled_tokens": "counter", "swaps": "counter",
            "swap_pause_s": "counter", "busy_s": "counter"}  # fmt: skip
    lines = ["# TYPE etude_engine_up gauge", "etude_engine_up 1"]
    for name, kind in rows.items():
        said = f"etude_engine_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# TYPE {said} {kind}", f"{said} {getattr(stats, name)}"]
    if stats.version is not None:
        lines += ["# TYPE etude_engine_step gauge", f"etude_engine_step {stats.version.step}"]
    return "\n".join(lines) + "\n"

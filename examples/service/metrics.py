"""What Prometheus reads: counters and histograms as things happen, gauges at the moment of asking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from examples.service.state import Service

__all__ = ["Metrics"]


class Metrics(Collector):
    """The metrics of one service, in a registry of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._moved: dict[str, int] = {}
        """By load that runs: bytes counted so far."""
        self.loaded_bytes = self._counter("ggufstream_loaded_bytes", "Bytes of files that devices have finished.")
        self.cancellations = self._counter("ggufstream_cancellations", "Loads that were cancelled.")
        self.failures = Counter(
            "ggufstream_failures", "Loads that failed, by type of error.", ["type"], registry=self._registry
        )
        self.load_seconds = Histogram(
            "ggufstream_load_seconds",
            "Time of a whole load.",
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
            registry=self._registry,
        )
        self.loop_lag_seconds = Histogram(
            "ggufstream_loop_lag_seconds",
            "By how much the event loop was late.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
            registry=self._registry,
        )
        self._registry.register(self)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def moved(self, load_id: str, nbytes: int) -> None:
        """A load has moved so many bytes in all. Those who share it tell the same several times."""
        self.loaded_bytes.inc(max(0, nbytes - self._moved.get(load_id, 0)))
        self._moved[load_id] = nbytes

    def ended(self, load_id: str) -> None:
        """No more bytes of it will come."""
        self._moved.pop(load_id, None)

    def collect(self) -> Iterator[Metric]:
        """The gauges; called while ``text`` runs."""
        memory = self._service.memory()
        yield _by("ggufstream_loads", "Loads by stage.", "stage", self._service.stages())
        yield _by("ggufstream_held_bytes", "Allocated for models, by memory.", "memory", memory.held_bytes)
        for name, text, value in (
            ("ggufstream_staging_bytes", "Host memory in use for moving bytes.", memory.staging_bytes),
            ("ggufstream_staging_limit_bytes", "Bound of it.", memory.staging_limit_bytes),
            ("ggufstream_resident_bytes", "Resident memory of the service.", memory.rss_bytes),
            ("ggufstream_streams", "Clients that watch.", self._service.streams),
        ):
            yield GaugeMetricFamily(name, text, value=value)

    def text(self) -> bytes:
        """All of them, in Prometheus's text format."""
        return generate_latest(self._registry)


def _by(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

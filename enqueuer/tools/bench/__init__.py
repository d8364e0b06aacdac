"""Measure a generator function on threads and processes, and name the best choice."""

from enqueuer.tools.bench.loop import Unmeasurable
from enqueuer.tools.bench.report import Measurement, Report
from enqueuer.tools.bench.run import bench, default_most_workers, ladder, longest_s

__all__ = [
    "Measurement",
    "Report",
    "Unmeasurable",
    "bench",
    "default_most_workers",
    "ladder",
    "longest_s",
]

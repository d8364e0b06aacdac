"""Measure a generator function on threads and processes, and name the best choice."""

from enqueuer.tools.bench.loop import Unmeasurable
from enqueuer.tools.bench.report import Measurement, Report
from enqueuer.tools.bench.run import bench, ladder, longest_s, most_workers

__all__ = ["Measurement", "Report", "Unmeasurable", "bench", "ladder", "longest_s", "most_workers"]

"""A trace of an enqueuer -> a recording -> its numbers, and a page with pictures."""

from enqueuer.tools.trace.numbers import totals_of
from enqueuer.tools.trace.page import page
from enqueuer.tools.trace.reader import read
from enqueuer.tools.trace.recording import Recording

__all__ = ["Recording", "page", "read", "totals_of"]

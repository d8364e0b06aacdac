"""The samples of a batch, fetched one by one: several at once, and without those that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from enqueuer.workers.plan import OnError

_log = logging.getLogger("enqueuer")


class Samples:
    """Fetch the samples of one batch after the other.

    Args:
        on_error: Handling of a sample that fails.
        concurrency: Number of samples that are fetched at once, each in a thread.
    """

    def __init__(self, on_error: OnError, concurrency: int) -> None:
        self._on_error = on_error
        self._concurrency = concurrency
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, dataset: Any, indices: Iterable[Any]) -> list[Any]:
        """Return the samples, without those that were skipped.

        Raises:
            Exception: A sample failed, and it is not skipped; or all of them failed.
        """
        found = list(self._map(lambda index: self._sample(dataset, index), indices))
        kept = [value for value, error in found if error is None]
        if found and not kept:
            raise found[-1][1]
        return kept

    def _map(self, function: Callable[[Any], Any], indices: Iterable[Any]) -> Iterable[Any]:
        if self._concurrency == 1:
            return map(function, indices)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._concurrency, "enqueuer-sample")
        return self._pool.map(function, indices)

    def _sample(self, dataset: Any, index: Any) -> tuple[Any, Any]:
        """Return a sample and None, or None and the error because of which it is skipped."""
        try:
            return dataset[index], None
        except Exception as error:
            if callable(self._on_error):
                value = self._on_error(error)
                return value, error if value is None else None
            if self._on_error == "raise":
                raise
            _log.error("skipped sample %r: %r", index, error, exc_info=error)
            return None, error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

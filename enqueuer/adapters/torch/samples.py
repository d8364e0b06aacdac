"""The samples of a batch, fetched one by one: several at once, and without those that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
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
        return _kept(list(self._map(lambda index: self._sample(dataset, index), indices)))

    def draw(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], bool]:
        """Return the next samples of a stream, and whether it is over; see `fetch`."""
        found: list[tuple[Any, Any]] = []
        while len(found) < count:
            try:
                found.append((next(iterator), None))
            except StopIteration:
                return _kept(found), True
            except Exception as error:
                found.append(self._instead(error, "the next sample"))
        return _kept(found), False

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
            return self._instead(error, f"sample {index!r}")

    def _instead(self, error: Exception, name: str) -> tuple[Any, Any]:
        """Return what `on_error` gives in the place of a sample, as `_sample` does."""
        if callable(self._on_error):
            value = self._on_error(error)
            return value, error if value is None else None
        if self._on_error == "raise":
            raise error
        _log.error("skipped %s: %r", name, error, exc_info=error)
        return None, error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}


def _kept(found: list[tuple[Any, Any]]) -> list[Any]:
    """Return the samples that were not skipped; raise the last error if all were."""
    kept = [value for value, error in found if error is None]
    if found and not kept:
        raise found[-1][1]
    return kept

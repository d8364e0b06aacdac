"""The restart policy: how many dead workers are replaced, and the message about it."""

from __future__ import annotations

from typing import NamedTuple


class DeathPlace(NamedTuple):
    """Where in the data a worker died.

    Attributes:
        shard: Index of the shard; of a task, the index of its first element.
        number: Number of the item or the task.
        text: The same in words.
    """

    shard: int
    number: int
    text: str


class Restarts:
    """The deaths after which a worker was replaced, and the limit of their number.

    A run has one for all its backends, so that other workers bring no further restarts.

    Args:
        most: Largest number of restarts in a run.

    Example:
        >>> restarts, place = Restarts(most=1), DeathPlace(0, 7, "shard 0, item 7")
        >>> restarts.allowed
        True
        >>> restarts.add(place); restarts.allowed
        False
        >>> restarts.history(place)
        ' max_restarts=1 is used up; 2 workers died at this very item.'
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._places: list[tuple[int, int]] = []

    @property
    def count(self) -> int:
        """Number of workers that died and were replaced. Read by any thread."""
        return len(self._places)

    @property
    def allowed(self) -> bool:
        """Whether another worker may be replaced."""
        return self.count < self.most

    def add(self, place: DeathPlace) -> None:
        """Record that a worker died at a place and was replaced."""
        self._places.append(place[:2])

    def history(self, place: DeathPlace) -> str:
        """Return, as a part of a message, how often replaced workers had died, and where.

        Args:
            place: Place of the death that is reported.
        """
        if not self.most:
            return ""
        here = self._places.count(place[:2])
        text = f" max_restarts={self.most} is used up"
        if here:
            text += f"; {here + 1} workers died at this very item"
        return f"{text}."

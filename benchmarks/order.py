"""How many events a second the order of items takes: run this file.

An event is what `enqueuer.order` is told or asked for one item: whose turn it is, and that the item
was taken; of a task, that its ticket goes out, that its result has come, and was taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from enqueuer.order.messages import Epoch, Item, Ticket
from enqueuer.order.sequence import Results, ShardOrder, TaskOrder

REPEATS, ITEMS, SHARDS = 7, 40_000, 8
# Tasks that are assigned at once; their results come back in the opposite order.
WINDOW = 10


def shards(ordered: bool) -> float:
    """Read the shards of an epoch; return the events of a second."""
    order = ShardOrder(Epoch(0), range(SHARDS), ordered)
    batches = [[Item(at % SHARDS, at // SHARDS, None)] for at in range(ITEMS)]
    begin = time.perf_counter()
    for items in batches:
        order.turn()
        order.take(items)
    return 2 * ITEMS / (time.perf_counter() - begin)


def tasks() -> float:
    """Do the tasks of an epoch; return the events of a second."""
    order, results = TaskOrder(Epoch(0), 0, ordered=True), Results()
    items = [Item(0, number, None) for number in range(ITEMS)]
    tickets = [Ticket(number, 0, (number,)) for number in range(ITEMS)]
    begin = time.perf_counter()
    for at in range(0, ITEMS, WINDOW):
        results.add(tickets[at : at + WINDOW])
        for item in reversed(items[at : at + WINDOW]):
            results.put(item)
        results.peek(order)
        results.take(order, WINDOW)
    return 3 * ITEMS / (time.perf_counter() - begin)


def main() -> None:
    """Print a line for each case."""
    cases: dict[str, Callable[[], float]] = {
        f"items of {SHARDS} shards in turn": lambda: shards(True),
        f"items of {SHARDS} shards as they come": lambda: shards(False),
        "tasks in order": tasks,
    }
    for name, case in cases.items():
        rate = statistics.median(case() for _ in range(REPEATS))
        print(f"{name:32} {rate / 1e6:5.2f} million events/s")


if __name__ == "__main__":
    main()

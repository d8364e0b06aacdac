"""What comes next, as data: no threads, no locks, no clocks, no signals, no I/O.

    messages.py    what comes in: items, ends, failures; and what goes out: tickets, epochs
    sequence.py    one epoch: which item is next, and the position between two items
    position.py    a position <-> the state that `state_dict()` returns
    ranks.py       the states of several ranks <-> one state

An epoch is one run through the source. It consists of items with numbers:

    shard       a run of the generator function. Its items are numbered from 0, those of None and
                those that failed included. Any worker may run it, but one runs it at a time
    task        the work on one element, or on those of one batch. All tasks of an epoch are one
                shard, number 0, whose items may be made in any order
    ticket      the order to do one task; it has the number of the task
    turn        what must be taken next: a shard, or a task; ANY if all will do
    position    a place between two items, as an `Epoch` of what is left: the rest
    share       the shards that a rank has of an epoch, if what remained of it was divided anew, as
                positions of other ranks were merged
    place       the index of an element in the order of the epoch, over all ranks
    division    the place from which on elements were divided anew, and later ones that were done

Numbers of one shard, or of all tasks:

    0 1 2 3 4 5 6 7 8 9
    D D - D - D R R . .     D delivered     - left out     R ready     . pending: the rest
                ^           the position: `Start.number` is 6, and `left_out` is 2
                    ^       the next number that is taken

An item has a `Stage`, which changes by `CHANGES`. A position of shards counts what was left out
behind it as of the rest; `done` of tasks keeps it. Besides:

    done        a task of a later number than one that is not done was delivered, or left out
    ended       a shard has no turn any more. When none has, the epoch is over
    failed      the failure stays in the place of the item, and is returned again and again; if it
                is skipped, it is passed over

What holds:

    Each item comes once. What was delivered before a position, and what is delivered by a run that
    begins there, are together a whole epoch.

    If `ordered`, the sequence is a function of the seed, of the shards and of the source. It does
    not depend on workers: their number, their speed, their deaths. Else the sequence depends on
    them, and the set of items does not.

    A position is complete. It has the start of each shard that has not ended, in the order of their
    turns. A run that begins there needs the source, the options, and nothing of the run before.

    The positions of all ranks have each shard, or each element, once. So they can be merged, and
    divided anew. A rank whose epoch is over has had all of its share.

What is left, if something ends early:

    a worker that died      the shards that it ran, with what is ready counted as taken. Of tasks:
                            those that have no result and that no living worker has
    another set of workers  the position, with what is ready counted as taken; all tickets
    an error that is raised what comes before it is delivered; the item that failed is of the rest
    `stop()`                the position, with what is ready in the rest
    `epochs=n`              no epoch begins early after that with number n - 1
    `first_item`            the same position: the shard begins there, and makes no item again
"""

import enum


class Stage(enum.Enum):
    """How far an item, or a task, is on its way to the loop."""

    PENDING = "neither delivered nor left out"
    READY = "taken, and still of the rest"
    DELIVERED = "returned by next(), or about to be"
    LEFT_OUT = "None, or a failure that was skipped"


CHANGES = {
    (Stage.PENDING, "take"): Stage.READY,
    (Stage.PENDING, "pass over"): Stage.LEFT_OUT,
    (Stage.READY, "deliver"): Stage.DELIVERED,
    (Stage.READY, "stop"): Stage.PENDING,
}
"""The next stage by each event. A death, or a change of workers, is none."""

"""Two ranks with `ordered=False`; the state of rank 0, which was in order by chance, for both.

Rank 1 was not in order, so one state does not tell which elements are left.
"""

import threading

from enqueuer import OrderedEnqueuer, StateMismatch, merge_states

others_are_done = threading.Event()


def slow_first_of_rank_1(x):
    if x == 1:
        others_are_done.wait(60)
    if x == 5:
        others_are_done.set()
    return x


def make(rank):
    return OrderedEnqueuer(
        range(12),
        slow_first_of_rank_1,
        workers=2,
        rank=rank,
        world_size=2,
        random_seed=1,
        ordered=False,
    )


had, states = [], []
for rank in range(2):
    with make(rank) as enqueuer:
        had += [next(enqueuer.get()) for _ in range(2)]
        states.append(enqueuer.state_dict())
try:
    make(1).load_state_dict(states[0])
    print("FAIL: the state of rank 0 was taken by rank 1")
except StateMismatch as error:
    print(error)
    for rank in range(2):
        enqueuer = make(rank)
        enqueuer.load_state_dict(merge_states(states))
        with enqueuer:
            had += enqueuer
    print("ok" if sorted(had) == list(range(12)) else f"FAIL: {sorted(had)}")

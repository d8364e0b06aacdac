"""Damage of saved states: what a file of JSON may hold after a bad night."""

import copy
import functools
import math

from hypothesis import strategies as st

# What JSON can hold, or a damaged file of it.
VALUES = [
    *(None, True, False, "x", "1", "", [], {}, -1, 0, 1, 2.5, math.nan, math.inf, 1e30),
    *(10**8, 10**12, 10**30, [0], [[0, 3]], [[0, 1, 2, 3]], [1, [2]], {"a": 1}, "long" * 10**5),
]
LONGEST = 1100


def places_in(value, path=()):
    """Yield the path of each value in a nest."""
    yield path
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(part, (*path, key))


@st.composite
def damaged(draw, state):
    """Return the state with one to three changes."""
    state = copy.deepcopy(state)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places_in(state))[1:]))
        *before, last = path
        owner = functools.reduce(lambda part, key: part[key], before, state)
        change = draw(st.sampled_from(["delete", "twice", *range(len(VALUES))]))
        if change == "delete":
            del owner[last]
        elif change == "twice":
            if isinstance(owner, list):
                owner.append(copy.deepcopy(owner[last]))
        else:
            owner[last] = copy.deepcopy(VALUES[change])
    return state

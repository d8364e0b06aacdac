"""mix() over a dict that was built in another order, from a set of names or a folder listing.

A state must go on with the same samples, and the shares of sources with states of their own must
stay as they are. Weights in the same proportions are the same weights.
"""

import json
import warnings

from enqueuer import GeneratorEnqueuer, mix

warnings.simplefilter("error")
problems = []


def text(shard):
    yield from (f"text{i}" for i in range(10))


def code(shard):
    yield from (f"code{i}" for i in range(10))


first = mix({"text": text, "code": code}, weights={"text": 1, "code": 1})
other = mix({"code": code, "text": text}, weights={"code": 0.25, "text": 0.25})
for at in range(1, 8):
    with GeneratorEnqueuer(first, random_seed=7, shards=1) as enqueuer:
        had = [next(enqueuer.get()) for _ in range(at)]
        state = json.loads(json.dumps(enqueuer.state_dict()))
    enqueuer = GeneratorEnqueuer(other, random_seed=7, shards=1)
    enqueuer.load_state_dict(state)
    with enqueuer:
        whole = had + list(enqueuer)
    every = {f"{name}{i}" for name in ("text", "code") for i in range(10)}
    # The first generator that ends, ends the mixture.
    if len(set(whole)) < len(whole) or len(every - set(whole)) > 1:
        problems.append(f"after {at} samples: {whole}")


class Own:
    """Samples without an end, with a state of their own."""

    def __init__(self, tag):
        self.tag, self.at = tag, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return self.tag

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def web(shard):
    return Own("web")


def books(shard):
    return Own("books")


def share_of_books(parts, state=None):
    mixed = mix(parts, weights={"web": 9, "books": 1})
    enqueuer = GeneratorEnqueuer(mixed, random_seed=7, shards=1)
    if state is not None:
        enqueuer.load_state_dict(state)
    with enqueuer:
        had = [next(enqueuer.get()) for _ in range(1000)]
        return had.count("books") / 1000, json.loads(json.dumps(enqueuer.state_dict()))


share, state = share_of_books({"web": web, "books": books})
for parts in ({"web": web, "books": books}, {"books": books, "web": web}):
    resumed, _ = share_of_books(parts, state)
    if share != 0.1 or resumed != 0.1:
        problems.append(f"the share of books is {share}, then {resumed} with {list(parts)}")
print("FAIL: " + "; ".join(problems) if problems else "ok")

"""Never run: checked by mypy --strict, as a user's own code would be."""

from collections.abc import Iterator
from pathlib import Path

from enqueuer import (
    Auto,
    Buffer,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Processes,
    Ray,
    Shard,
    Task,
    balance,
    batch_by_length,
    imap,
    mix,
    pack,
    pad,
    prefetch,
)


def numbers(shard: Shard) -> Iterator[int]:
    yield from shard.split(range(10))


def words() -> Iterator[str]:
    yield "word"


def noisy(number: int, task: Task) -> float:
    return number + task.rng.random()


def sum_of(enqueuer: GeneratorEnqueuer[int]) -> int:
    total = 0
    with enqueuer as running:
        for number in running:
            total += number
    return total


sum_of(GeneratorEnqueuer(numbers, workers=Auto(most=4)))
sum_of(GeneratorEnqueuer(numbers, workers=2, backend="process", random_seed=7))
sum_of(
    GeneratorEnqueuer(
        numbers,
        backend=Ray(address="auto", actor_options={"num_gpus": 0.5}, copy_arrays=True),
    )
)
sum_of(GeneratorEnqueuer(mix({"a": numbers, "b": numbers}, weights=[2, 1], at_end="restart")))
sum_of(GeneratorEnqueuer(mix({"a": numbers, "b": numbers}, weights=[(9, [2, 1]), (1, [1, 1])])))
sum_of(GeneratorEnqueuer(mix({"a": numbers, "b": numbers}, weights=lambda sample: [1, sample])))
for row in GeneratorEnqueuer(
    lambda shard: pack([[1, 2]], 4, rng=shard.rng, boundaries="cu_seqlens")
):
    print(row["tokens"].sum())
buckets = batch_by_length(["a", "bb"], max_tokens=4, collate=pad)
buckets.load_state_dict(buckets.state_dict())
smallest: int = min(len(part) for part in balance([3, 4], 2, cost=lambda lengths: lengths**2))
first: str = next(GeneratorEnqueuer(words).get())
again: str = GeneratorEnqueuer(iter(["a"]), True, random_seed=7).queue.get(timeout=1.0)
ordered = OrderedEnqueuer(range(10), noisy, shuffle=True, batch_size=4, drop_last=True)
steps: int = len(ordered)
ordered.start(workers=2, max_queue_size=5)
batch: object = next(ordered.get())
rows = OrderedEnqueuer((row for row in "abc"), str.upper, collate=list, batch_size=2)
pairs = OrderedEnqueuer(
    [(1, 2)], trace=Path("run.json"), backend="process", on_error=lambda error: None
)
state: dict[str, object] = pairs.state_dict()
for word in prefetch(words, ordered=False, trace="run.json"):
    print(word.upper())
for length in imap(len, ["one", "three"], workers=2, backend="process"):
    print(length + 1)
forked = Processes(start_method="fork", threads=1, forward_logs="multiprocessing-logging")
for number in prefetch(numbers, 4, shards=8, workers="auto", backend=forked, timeout=1.5):
    print(number + 1)
for length in imap(len, ["one"], workers=Auto(), backend=Ray(address="auto"), on_error="skip"):
    print(length + 1)
# An option that does not exist, or has another type, is found before the program runs.
prefetch(words, worker=4)  # type: ignore[call-overload]
imap(len, ["one"], backend="fork")  # type: ignore[call-overload]
GeneratorEnqueuer(numbers, mp_context="fork")  # type: ignore[call-overload]
OrderedEnqueuer(range(10), ordered="no")  # type: ignore[call-overload]
Processes(start_methods="fork")  # type: ignore[call-arg]


async def async_sum_of(enqueuer: GeneratorEnqueuer[int]) -> int:
    total = 0
    async with enqueuer as running:
        async for number in running:
            total += number
    return total


buffer: Buffer[int] = Buffer(max_size=3)
buffer.put(1, timeout=0.5)
taken: int = buffer.get()
share: list[str] = list(Shard(0, 2, 0, 7).split(["a", "b"]))

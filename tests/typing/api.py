"""Never run: checked by mypy --strict, as a user's own code would be."""

from collections.abc import Iterator

from enqueuer import Buffer, GeneratorEnqueuer, Shard, prefetch


def numbers(shard: Shard) -> Iterator[int]:
    yield from shard.split(range(10))


def words() -> Iterator[str]:
    yield "word"


def sum_of(enqueuer: GeneratorEnqueuer[int]) -> int:
    total = 0
    with enqueuer as running:
        for number in running:
            total += number
    return total


sum_of(GeneratorEnqueuer(numbers, workers=2, backend="process", random_seed=7))
first: str = next(GeneratorEnqueuer(words).get())
again: str = GeneratorEnqueuer(iter(["a"]), True, 0.05, 7).queue.get(timeout=1.0)
for word in prefetch(words, ordered=False):
    print(word.upper())
buffer: Buffer[int] = Buffer(max_size=3)
buffer.put(1, timeout=0.5)
taken: int = buffer.get()
share: list[str] = list(Shard(0, 2, 0, 7).split(["a", "b"]))

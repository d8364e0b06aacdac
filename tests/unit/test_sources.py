"""Arguments of the user -> sources that a shard can run. Errors: contract/test_source.py."""

import functools

import pytest

from enqueuer import Shard
from enqueuer.workers.sources import FunctionSource, LiveSource, as_source

SHARD = Shard(1, 2, 0, 7)


class Method:
    def none(self):
        yield "none"

    def one(self, shard):
        yield shard.index

    def __call__(self, shard=None):
        yield shard


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (lambda: iter("a"), "a"),
        (lambda s: iter([s.index]), 1),
        (lambda batch_size=32: iter([batch_size]), 32),
        (lambda shard=None: iter([shard]), SHARD),
        (lambda *args, **options: iter([(args, options)]), ((), {})),
        (functools.partial(lambda a, s: iter([(a, s.index)]), 5), (5, 1)),
        (
            functools.partial(lambda s, batch_size: iter([(s.index, batch_size)]), batch_size=3),
            (1, 3),
        ),
        (Method().none, "none"),
        (Method().one, 1),
        (Method(), SHARD),
        (dict, None),
    ],
)
def test_a_function_gets_the_shard_if_it_asks_for_it(function, first):
    source = as_source(function)
    assert isinstance(source, FunctionSource)
    assert next(iter(source.open(SHARD)), None) == first


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda a, b: None, "needs 2: a, b"),
        (lambda *, key: None, "needs 1: key"),
        (lambda s, *, key: None, "needs 2: s, key"),
    ],
)
def test_other_arguments_are_refused(function, says):
    with pytest.raises(TypeError, match=says):
        as_source(function)


def test_an_iterator_is_live_even_if_it_can_be_called():
    class Both:
        def __call__(self):
            raise AssertionError

        def __iter__(self):
            return self

        def __next__(self):
            return 1

    assert isinstance(as_source(Both()), LiveSource)


def test_coroutines_are_refused():
    async def main():
        pass

    coroutine = main()
    with pytest.raises(TypeError, match="a coroutine gives one result"):
        as_source(coroutine)
    coroutine.close()
    with pytest.raises(TypeError, match="a coroutine gives one result"):
        as_source(main)

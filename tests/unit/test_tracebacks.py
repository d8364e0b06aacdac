"""A traceback that has crossed reads as it did, down to the columns that are underlined."""

import pickle
import sys
import traceback

import pytest

from enqueuer.transport import errors


def looks_up():
    table, x = {"a": 1}, None
    return (table["a"] + 1 +
        table["missing"] + 3) + x.foo  # fmt: skip


def counts():
    return len("é") + looks_up() + 2


def divides():
    return 1 + (
        2
        // 0
    )  # fmt: skip


def raises():
    raise ValueError("as told")


def deep(depth=40):
    return len("a" * 100) + (deep(depth - 1) if depth else looks_up()) + len("b" * 1000)


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("function", [looks_up, counts, divides, raises, deep])
def test_it_reads_the_same(function):
    error = raised_by(function)
    whole = traceback.format_exception(error)
    rebuild, given = errors.reduce(error.__traceback__)
    again = error.with_traceback(rebuild(*pickle.loads(pickle.dumps(given))))
    assert traceback.format_exception(again) == whole


def test_that_of_an_error_which_crosses_does():
    error = raised_by(counts)
    whole = traceback.format_exception(error)
    assert traceback.format_exception(errors.decode_error(errors.encode_error(error))) == whole
    assert sys.version_info < (3, 11) or "~~~~~^^^^^^^^^^^" in "".join(whole)


def test_it_can_be_sent_on():
    error = raised_by(counts)
    whole = traceback.format_exception(error)
    for _ in range(2):
        error = errors.decode_error(errors.encode_error(error))
    assert traceback.format_exception(error) == whole


def test_where_the_columns_are_unknown_none_are_underlined():
    rebuild, ([place],) = errors.reduce(raised_by(raises).__traceback__.tb_next)
    place = place._replace(function="f", line=20, span=(20, -1, -1))
    [line] = traceback.format_tb(rebuild([place]))
    assert "^" not in line
    assert "line 20, in f" in line

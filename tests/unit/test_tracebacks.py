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


def test_it_can_be_sent_on():
    error = raised_by(counts)
    whole = traceback.format_exception(error)
    for _ in range(2):
        error = errors.decode_error(errors.encode_error(error))
    assert traceback.format_exception(error) == whole
    assert sys.version_info < (3, 11) or "~~~~~^^^^^^^^^^^" in "".join(whole)


@pytest.mark.parametrize("function", [looks_up, raises])
def test_the_code_of_a_frame_begins_at_its_line(function):
    tb = raised_by(function).__traceback__
    rebuild, given = errors.reduce(tb)
    again = rebuild(*given)
    code = again.tb_next.tb_frame.f_code
    assert (code.co_firstlineno, again.tb_next.tb_lineno) == (tb.tb_next.tb_lineno,) * 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs columns")
@pytest.mark.parametrize(
    "table",
    [
        b"",  # no instruction has a line
        bytes([0x80 | 14 << 3 | 7, 0, 0, 9, 3]) * 4,  # columns that end before they begin
    ],
)
def test_code_with_an_odd_table_of_lines_arrives_as_itself(table):
    def odd():
        raise ValueError("as told")

    odd.__code__ = odd.__code__.replace(co_linetable=table)
    again = errors.decode_error(errors.encode_error(raised_by(odd)))
    assert type(again) is ValueError
    assert "in odd" in "".join(traceback.format_tb(again.__traceback__))


def test_where_the_columns_are_unknown_none_are_underlined():
    rebuild, ([place],) = errors.reduce(raised_by(raises).__traceback__.tb_next)
    place = place._replace(function="f", line=20, span=(0, -1, -1))
    [line] = traceback.format_tb(rebuild([place]))
    assert "^" not in line
    assert "line 20, in f" in line

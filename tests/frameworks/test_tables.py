"""pandas and pyarrow: tables come through equal, and their columns go out of band."""

import numpy as np
import pytest
from helpers import needs

from enqueuer import EmptyEpochWarning, GeneratorEnqueuer, OrderedEnqueuer, Shard, imap
from enqueuer.transport import item_codec

ROWS = 20_000


def frames():
    import pandas

    numbers = np.arange(ROWS)
    frame = pandas.DataFrame(
        {
            "int": numbers,
            "float": numbers / 3,
            "bool": numbers % 2 == 0,
            "time": pandas.date_range("2020-01-01", periods=ROWS, freq="s", tz="Europe/Vienna"),
            "text": numbers.astype(str),
            "kind": pandas.Categorical(np.array(["a", "b"])[numbers % 2]),
            "maybe": pandas.array([1, None] * (ROWS // 2), dtype="Int64"),
        }
    )
    yield frame
    yield frame.iloc[::2]
    yield frame.set_index(["int", "text"])[["float"]]
    yield frame.head(3)
    yield pandas.Series(numbers, name="numbers")
    yield pandas.DataFrame(np.arange(4 * ROWS, dtype="f4").reshape(-1, 4)).T


def tables():
    import pyarrow as arrow

    numbers = np.arange(ROWS)
    table = arrow.table({"int": numbers, "text": arrow.array(numbers.astype(str))})
    yield table
    yield table.slice(10, 100)
    yield arrow.array([1, None, 3])
    yield arrow.array([[1, 2], [], None] * ROWS)
    yield table.to_batches()[0]


SOURCES = [frames, tables]
PACKAGES = {frames: "pandas", tables: "pyarrow"}


@pytest.mark.parametrize("source", SOURCES)
def test_tables_come_through_equal(backend, source):
    needs(PACKAGES[source])
    with GeneratorEnqueuer(source, max_queue_size=2, **backend) as enqueuer:
        kept = list(zip(enqueuer, source(), strict=True))
    for got, sent in kept:
        assert type(got) is type(sent)
        assert got.equals(sent)


@pytest.mark.parametrize("source", SOURCES)
def test_large_columns_are_beside_the_pickle(source):
    needs(PACKAGES[source])
    first = next(source())
    data, buffers = item_codec.Encoder().encode(
        first[["int", "float"]] if source is frames else first
    )
    assert len(data) < 2000
    assert sum(buffer.nbytes for buffer in buffers) >= ROWS * 16


@pytest.mark.parametrize("index", [[1, 0, 2], [3, 7, 5], ["a", "b", "c"], [0.5, 1.5, 0.0]])
def test_a_series_is_a_sequence_by_place(index, backend):
    series = needs("pandas").Series([10, 20, 30], index=index)
    assert list(OrderedEnqueuer(series, float, **backend)) == [10, 20, 30]
    batches = OrderedEnqueuer(series, batch_size=2, **backend)
    assert [batch.tolist() for batch in batches] == [[10, 20], [30]]
    assert list(imap(float, series[::-1], **backend)) == [30, 20, 10]
    assert sorted(OrderedEnqueuer(series, float, shuffle=True, **backend)) == [10, 20, 30]


def test_a_part_of_a_series_goes_by_place():
    series = needs("pandas").Series([10, 20, 30], index=[0.5, 1.5, 0.0])
    assert list(Shard(0, 2, 0, 0).split(series)) == [10, 30]


def test_an_empty_series_has_no_elements():
    with pytest.warns(EmptyEpochWarning, match="there are no elements"):
        assert list(OrderedEnqueuer(needs("pandas").Series([], dtype=float))) == []


def test_a_frame_is_no_sequence_of_rows():
    frame = needs("pandas").DataFrame({"path": ["a", "b"], 0: [1, 2], 1: [3, 4]})
    with pytest.raises(TypeError, match=r"a DataFrame, of which \[i\] is a column.*to_dict"):
        OrderedEnqueuer(frame)


def test_an_arrow_table_is_no_sequence_of_rows():
    table = needs("pyarrow").table({"a": [1, 2], "b": [3, 4]})
    with pytest.raises(TypeError, match=r"a Table, of which \[i\] is a column.*to_pylist"):
        OrderedEnqueuer(table)


def test_the_groups_of_a_frame_are_iterated():
    groups = needs("pandas").DataFrame({0: [1, 1, 2], 1: [3, 4, 5]}).groupby(0)
    assert list(imap(lambda group: (group[0], len(group[1])), groups)) == [(1, 2), (2, 1)]

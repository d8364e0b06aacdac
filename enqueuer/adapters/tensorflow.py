"""An enqueuer, or any other iterable of batches, as a `tf.data.Dataset`.

    loader -> Loader: fit to the signature -> from_generator -> map, shuffle, ... -> the loop

TensorFlow reads one batch after the other in a thread of its own. It keeps the function that makes
a dataset as long as the program runs, so that function must not hold the loader.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from enqueuer.adapters.loading import Loader, LoaderEpochs, reader_of
from enqueuer.common.extras import framework
from enqueuer.common.text import an

tf = framework("tensorflow", "tensorflow", "2.14")

__all__ = ["as_dataset"]


def as_dataset(
    enqueuer: Iterable[Any],
    output_signature: Any = None,
    *,
    steps_per_epoch: int | None = None,
) -> Any:
    """Return a `tf.data.Dataset` of an enqueuer's batches; each pass over it is an epoch.

    An enqueuer that does not run is started here. It is stopped when the dataset, all datasets
    made of it and their iterators are gone. After a `break`, or `take()`, the next pass continues
    with the next batch. The dataset takes a batch only when it is asked for one. But
    transformations such as `map`, `shuffle` and `prefetch` read ahead, and batches that they hold
    at a `break` are lost.

    Batches are numbers, strings, arrays and tensors, also nested in dicts, tuples and named
    tuples. A list of plain values is an array, as usual in TensorFlow; a list that contains
    arrays, dicts or tuples stands for a tuple.

    Args:
        enqueuer: An enqueuer, or any object that can be iterated once an epoch.
        output_signature: Nested structure of `tf.TypeSpec`, as in `from_generator`. None, the
            default: that of the first batch, which is taken at once, and is the first batch of
            the first pass. Then the first dimension of arrays is None, so that a smaller last
            batch fits. Strings are `tf.string`; Python's int is int32, its float is float32.
        steps_per_epoch: Number of batches in a pass, for generators without an end, and for
            `len(dataset)` and Keras. Each pass then has as many: where an epoch ends earlier,
            the next one follows. None, the default: a pass is an epoch, or the rest of one, and
            its length is unknown.

    Raises:
        TypeError: The first batch has a value that cannot be a tensor.
        ValueError: There is no first batch.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> def batches(shard):
        ...     for n in shard.split([2, 2, 1]):
        ...         yield {"x": np.ones((n, 3), "float32"), "name": ["a"] * n}
        >>> dataset = as_dataset(GeneratorEnqueuer(batches))
        >>> dataset.element_spec["x"].shape
        TensorShape([None, 3])
        >>> [len(batch["name"]) for batch in dataset.repeat(2)]
        [2, 2, 1, 2, 2, 1]
        >>> [row["name"].numpy() for row in dataset.unbatch().take(1)]
        [b'a']
    """
    passes = _Passes(enqueuer, steps_per_epoch, output_signature)
    # TensorFlow keeps this function forever.
    begin = functools.partial(_begin_pass, weakref.ref(passes))
    dataset = tf.data.Dataset.from_generator(begin, output_signature=passes.output_signature)
    if steps_per_epoch is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(steps_per_epoch))
    options = tf.data.Options()
    # Without this, TensorFlow adds a prefetch() by itself, and each `break` loses a batch.
    options.experimental_optimization.inject_prefetch = False
    dataset = dataset.with_options(options)
    # Datasets hold those that they are made of, and iterators hold their dataset.
    dataset._enqueuer_passes = passes
    return dataset


class _Passes:
    """The passes over a loader; the dataset owns this, and so the workers."""

    def __init__(
        self, loader: Iterable[Any], steps_per_epoch: int | None, output_signature: Any
    ) -> None:
        self._reader = reader_of(Loader[Any](loader, steps_per_epoch))
        # The batch that the signature was taken from, until it is given, and the following ones.
        self._first: list[Any] = []
        self._remaining: Iterator[Any] | None = None
        # When TensorFlow starts it later, an exception would become an error of TensorFlow.
        self._reader.start()
        self.output_signature = output_signature
        if output_signature is not None:
            return
        remaining = _pass(self._reader.epochs)
        for batch in remaining:
            self.output_signature = _signature(batch, "")
            self._first, self._remaining = [batch], remaining
            return
        raise ValueError(
            "there is no batch to take the signature from, as the first epoch is empty; "
            "give output_signature"
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over a pass, without keeping this object.

        A thread of TensorFlow iterates. It may wait for a batch when the dataset is dropped. Then
        this object ends, stops the workers, and so wakes that thread.
        """
        remaining, self._remaining = self._remaining or _pass(self._reader.epochs), None
        batches = itertools.chain(_emptied(self._first), remaining, _end(weakref.ref(self)))
        return map(functools.partial(_fitted, spec=self.output_signature), batches)


def _begin_pass(reference: weakref.ref[_Passes]) -> Iterator[Any]:
    passes = reference()
    return _end(reference) if passes is None else iter(passes)


def _pass(epochs: LoaderEpochs) -> Iterator[Any]:
    """Yield the batches of an epoch, or the rest of one if something is left of it."""
    for _ in range(2):
        # With steps_per_epoch each pass has as many.
        epochs.step = 0
        is_empty = True
        for batch in epochs:
            is_empty = False
            yield batch
            # Without this, the batch stays alive during the wait for the next one.
            del batch
        # Keras counts the batches of a pass, and begins the next one before it has seen the end of
        # this one. Then the pass is empty, and the next epoch is meant.
        if not is_empty:
            return


def _emptied(batches: list[Any]) -> Iterator[Any]:
    while batches:
        yield batches.pop()


def _end(passes: weakref.ref[_Passes]) -> Iterator[Any]:
    """Yield nothing; raise if the dataset is gone."""
    if passes() is None:
        raise ReferenceError(
            "the dataset that as_dataset() returned is gone, and its workers with it; keep it as "
            "long as something that was made of it is used"
        )
    yield from ()


def _signature(value: Any, where: str) -> Any:
    """Return the signature of a batch, or of its part at `where`."""
    if isinstance(value, Mapping):
        return {key: _signature(part, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple) or _is_tuple(value):
        parts = [_signature(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    try:
        # The scope makes this eager inside of graphs, too.
        with tf.init_scope():
            plain = None if hasattr(value, "__array__") else tf.convert_to_tensor(value).dtype
        array = _array(value)
        dtype = tf.string if _is_text(array) else plain or tf.as_dtype(array.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"batch{where} cannot be a tensor: it is {_shown(value)}; yield numbers, strings, "
            "arrays, and dicts and tuples of them, or give output_signature"
        ) from error
    return tf.TensorSpec((None, *array.shape[1:]) if array.ndim else (), dtype)


def _fitted(value: Any, spec: Any, where: str = "") -> Any:
    """Return a batch, or a part of one, in the form of `spec`."""
    if isinstance(spec, Mapping):
        if not isinstance(value, Mapping) or value.keys() != spec.keys():
            raise _misfit(value, spec, where)
        return {key: _fitted(value[key], part, f"{where}[{key!r}]") for key, part in spec.items()}
    if isinstance(spec, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(spec):
            raise _misfit(value, spec, where)
        pairs = zip(value, spec, strict=True)
        parts = [_fitted(part, like, f"{where}[{i}]") for i, (part, like) in enumerate(pairs)]
        return type(spec)(*parts) if hasattr(spec, "_fields") else tuple(parts)
    # TensorFlow itself checks ragged and sparse values.
    if not isinstance(spec, tf.TensorSpec):
        return value
    try:
        array = _cast(_array(value), spec.dtype)
    except (TypeError, ValueError) as error:
        raise _misfit(value, spec, where) from error
    if not spec.shape.is_compatible_with(array.shape):
        raise _misfit(value, spec, where)
    return array


def _is_tuple(value: Any) -> bool:
    """Return whether a list has components, rather than plain values."""
    return isinstance(value, list) and any(
        isinstance(part, (Mapping, tuple)) or getattr(part, "ndim", 0) or _is_tuple(part)
        for part in value
    )


def _array(value: Any) -> np.ndarray:
    # A torch tensor.
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array = np.asarray(value)
    if array.dtype.kind == "O" and not _is_text(array):
        raise TypeError("it holds Python objects")
    return array


def _is_text(array: np.ndarray) -> bool:
    if array.dtype.kind == "O":
        return all(isinstance(part, (str, bytes)) for part in array.flat)
    return array.dtype.kind in "SUT"


def _cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array with another dtype; numbers may lose precision, but nothing else."""
    wanted = np.dtype(dtype.as_numpy_dtype)
    if array.dtype == wanted:
        return array
    if _is_text(array) != (dtype == tf.string):
        raise TypeError("text is not numbers")
    cast = array.astype(wanted)
    if dtype.is_integer and array.dtype.kind in "iu":
        if not np.array_equal(cast, array):
            raise ValueError("a number is too large")
    elif not np.can_cast(array.dtype, wanted, "same_kind"):
        raise TypeError("it would be another kind of number")
    return cast


def _misfit(value: Any, spec: Any, where: str) -> TypeError:
    return TypeError(
        f"batch{where} does not fit the signature: it is {_shown(value)}, and the signature says "
        f"{spec}; as_dataset() takes the signature from the first batch, unless you give "
        "output_signature"
    )


def _shown(value: Any) -> str:
    """Describe a value in one line, for an error."""
    name = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"of shape {tuple(value.shape)} and dtype {value.dtype} ({name})"
    if isinstance(value, Mapping):
        return f"{an(name)} with the keys {list(value)}"
    if isinstance(value, tuple):
        return f"{an(name)} of length {len(value)}"
    text = repr(value)
    return f"{text if len(text) < 80 else text[:80] + '...'} ({name})"

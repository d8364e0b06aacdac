"""An item <-> bytes: a pickle and the large buffers beside it, or small arrays behind a layout.

    Encoder().encode(value) -> pickle, buffers     decode(pickle, buffers) -> value
    Layouts().encode(value) -> layout, bytes       decode_arrays(layout, bytes) -> value

Pickle protocol 5 with the large buffers out of band. Plain pickle is tried first, since it is
fast; what it refuses, such as local classes and functions, goes by `definitions`.

Two kinds of objects are pickled in our own way; subclasses keep their own ways:

- A numpy array becomes `ndarray(shape, dtype, buffer)`, which is three to four times as fast as
  numpy's own way for small ones, as it looks up fewer names. It also works out of band for what
  numpy would copy into the pickle: datetimes and arrays that are not contiguous.
- A torch tensor becomes a numpy array of the same memory. torch is not imported unless there are
  tensors: the worker that yields one has imported it, and the consumer does so for the first one.

Small arrays in a dict, a list or a tuple need no pickle. The layout names the container, and the
shape, dtype and place of each array. It is pickled once for all items that have it; its bytes
stand before those of each item. Pickle writes and looks up the same names for each item, which
takes several times as long.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import itertools
import math
import mmap
import pickle
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pickle import PickleBuffer
from typing import Any

import numpy as np

from enqueuer.common.objects import OUT_OF_BAND_BYTES, check_graph, is_plain_tensor, tensor_class
from enqueuer.errors import ItemNotPicklable
from enqueuer.transport.channel import INLINE_BYTES

# numpy has no bfloat16 and no float8, so a tensor travels as numbers of the same size.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor for pickle: to an array, or in torch's own way if it is not a plain one.

    Plain is what lies in the memory of the CPU and needs no gradient. The order of the
    dimensions in memory is kept (channels last, for example); gaps are not.
    """
    array = _array_of(tensor)
    if array is not None:
        return from_array, (array,)
    check_graph(tensor)
    if not _has_carrier(tensor):
        return tensor.__reduce_ex__(5)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    array = _carrier_of(tensor.permute(order))
    return as_tensor, (array, str(tensor.dtype).removeprefix("torch."), order)


def _reduce_subclass(tensor: Any) -> Any:
    check_graph(tensor)
    return tensor.__reduce_ex__(5)


def copy_in_thread(target: Any, source: Any) -> None:
    """Copy a tensor of the CPU to another one, on this thread alone.

    torch would take all CPUs, which the workers need. Its own limit, when set in one thread,
    holds for the threads that are started later, too.
    """
    np.copyto(_carrier_of(target), _carrier_of(source.resolve_conj().resolve_neg()))


def as_tensor(array: np.ndarray, dtype: str, order: Sequence[int]) -> Any:
    """Return the tensor that `reduce_tensor` was given; it shares the array's memory."""
    tensor = from_array(array).view(getattr(sys.modules["torch"], dtype))
    return tensor.permute([order.index(dim) for dim in range(len(order))])


def from_array(array: np.ndarray) -> Any:
    """Return the tensor of an array, which shares its memory.

    A read-only array, such as Ray's object store has them, is copied: torch knows no tensor that
    cannot be written to.
    """
    torch = sys.modules.get("torch") or importlib.import_module("torch")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _array_of(tensor: Any) -> np.ndarray | None:
    """Return a tensor as an array of its memory; None if numpy lacks its dtype or its order.

    Most tensors are of this kind. The checks of `_has_carrier` and the calls after them take
    several times as long.
    """
    if type(tensor) is not sys.modules["torch"].Tensor or tensor.__dict__:
        return None
    try:
        array: np.ndarray = tensor.numpy()
    except (RuntimeError, TypeError):
        return None
    return array if array.flags.c_contiguous else None


def _has_carrier(tensor: Any) -> bool:
    return (
        is_plain_tensor(tensor)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.element_size() in _CARRIERS
        and not tensor.__dict__
    )


def _carrier_of(tensor: Any) -> np.ndarray:
    """Return an array of the same memory, of numbers of the same size as those of a tensor."""
    carrier = getattr(sys.modules["torch"], _CARRIERS[tensor.element_size()])
    array: np.ndarray = tensor.view(carrier).numpy()
    return array


# Buffers out of band: the table of an item's buffers must fit into a frame.
_MAX_BUFFERS = 1024
# Dtypes that are remembered; a program that makes more of them starts anew.
_MAX_DTYPES = 1000

Buffer = memoryview | np.ndarray
"""Bytes beside a pickle: contiguous ones, or an array that is not."""


class Pieces:
    """A pickle in pieces, as the pickler writes it if the item has long byte strings.

    Each `bytes` or `bytearray` of 64 KiB or more is a piece, so it is not copied yet.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = list(pieces)
        self.nbytes = sum(map(len, self._pieces))

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)

    def copy_to(self, memory: mmap.mmap, begin: int) -> None:
        """Write the pickle into memory, from `begin` on."""
        for piece in self._pieces:
            end = begin + len(piece)
            memory[begin:end] = piece
            begin = end


class Encoder:
    """Encode items as pickles; for one thread.

    Attributes:
        arrays: Large numpy arrays that were encoded since this list was cleared.
    """

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._chunks: list[bytes] = []
        self._buffers: list[Buffer] = []
        self._strided: dict[int, np.ndarray] = {}
        self.write = self._chunks.append
        # One pickler for all items: to make one costs as much as to pickle a small item.
        self._pickler = pickle.Pickler(self, protocol=5, buffer_callback=self._keep_in_band)
        self._pickler.dispatch_table = _Reducers(self._reduce_array)

    def encode(self, value: object) -> tuple[bytes | Pieces, Sequence[Buffer]]:
        """Return `value` as a pickle and the buffers that belong beside it.

        The buffers are views of the value's own memory: use them before it changes.

        Raises:
            ItemNotPicklable: It cannot be pickled. The message says why.
        """
        try:
            self._pickler.dump(value)
        except Exception:
            self._take()
            return self._by_value(value), self._take()[1]
        except BaseException:
            self._take()
            raise
        return self._take()

    def _take(self) -> tuple[bytes | Pieces, Sequence[Buffer]]:
        """Return what the pickler has made, and have it forget the item."""
        chunks, buffers = self._chunks, self._buffers
        data = chunks[0] if len(chunks) == 1 else Pieces(chunks)
        chunks.clear()
        self._pickler.clear_memo()
        if not buffers:
            return data, ()
        self._buffers = []
        return data, buffers

    def _by_value(self, value: object) -> bytes:
        # Few items need these two, whose import takes some milliseconds of the first start.
        from enqueuer.transport.definitions import dumps
        from enqueuer.transport.errors import describe_culprit

        try:
            return dumps(value, buffer_callback=self._keep_in_band)
        except Exception as error:
            raise ItemNotPicklable(describe_culprit(value, error)) from error

    def _keep_in_band(self, buffer: PickleBuffer) -> bool:
        """Take a buffer out of the pickle if it is large; called by the pickler."""
        view: Buffer | None = self._strided.pop(id(buffer), None) if self._strided else None
        if view is None:
            view = buffer.raw()
            if view.nbytes < OUT_OF_BAND_BYTES or len(self._buffers) == _MAX_BUFFERS:
                return True
        self._buffers.append(view)
        return False

    def _reduce_array(self, array: np.ndarray) -> Any:
        dtype: str | np.dtype[Any] = array.dtype
        name = portable_dtypes[array.dtype]
        if name is None:
            return array.__reduce_ex__(5)
        # Dtypes that differ only in their metadata are equal, and so share one name.
        if name and array.dtype.metadata is None:
            dtype = name
        flags = array.flags
        is_large = array.nbytes >= OUT_OF_BAND_BYTES
        if is_large:
            self.arrays.append(array)
        elif flags.carray:
            # Contiguous and writable, so a bytearray does, which is faster than a buffer.
            try:
                return np.ndarray, (array.shape, dtype, bytearray(array.data))
            except ValueError:
                # A datetime, for example, has no buffer: see `_buffer_of`.
                pass
        if flags.c_contiguous:
            return np.ndarray, (array.shape, dtype, _buffer_of(array))
        if flags.f_contiguous:
            return np.ndarray, (array.shape, dtype, _buffer_of(array), 0, array.strides)
        if not is_large or len(self._buffers) == _MAX_BUFFERS:
            return np.ndarray, (array.shape, dtype, _buffer_of(array.copy()))
        # It is to be copied straight into its block. A buffer that pickle accepts stands for it;
        # the pickler's memo keeps that one, and so its id, for as long as this item takes.
        stand_in = PickleBuffer(bytearray())
        self._strided[id(stand_in)] = array
        return np.ndarray, (array.shape, dtype, stand_in)


def decode(data: bytes | memoryview, buffers: Iterable[memoryview]) -> Any:
    """Return the item that was encoded; its arrays are views of `buffers`."""
    return pickle.loads(data, buffers=buffers)


class _Reducers(dict[type, Callable[[Any], Any]]):
    """Functions that reduce objects of some types; for others `copyreg` is asked, as by pickle."""

    def __init__(self, reduce_array: Callable[[np.ndarray], Any]) -> None:
        super().__init__({np.ndarray: reduce_array, np.memmap: _reduce_memmap})

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        # Recognized by name, so that a program without these types need not import them.
        way = _BY_NAME.get((kind.__module__, kind.__qualname__))
        if way is None and issubclass(kind, tensor_class()) and kind not in copyreg.dispatch_table:
            way = _reduce_subclass
        if way is None:
            return copyreg.dispatch_table[kind]
        self[kind] = way
        return way


class _PortableDtypes(dict[np.dtype[Any], "str | None"]):
    """For each dtype, but for its metadata, its name in a pickle.

    The name is empty if it does not say all; it is None for objects.
    """

    def __missing__(self, dtype: np.dtype[Any]) -> str | None:
        if len(self) >= _MAX_DTYPES:
            self.clear()
        name: str | None = ""
        if dtype.hasobject or dtype.itemsize == 0:
            name = None
        elif dtype.names is None and np.dtype(dtype.str) == dtype:
            name = dtype.str
        self[dtype] = name
        return name


portable_dtypes = _PortableDtypes()


def _buffer_of(array: np.ndarray) -> PickleBuffer:
    """Return the memory of a contiguous array, whatever its dtype."""
    try:
        return PickleBuffer(array)  # type: ignore[arg-type]  # numpy declares no buffer
    except (BufferError, ValueError):
        # This is a datetime, or a dtype that numpy does not know itself.
        flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
        return PickleBuffer(flat.view(np.uint8))  # type: ignore[arg-type]  # the same


def _reduce_memmap(array: np.memmap[Any, Any]) -> Any:
    """Reduce a slice of a mapped file so that it arrives as a memmap, too, but of memory."""
    return _as_memmap, (np.asarray(array),)


def _as_memmap(array: np.ndarray) -> np.ndarray:
    return array.view(np.memmap)


def _reduce_masked(array: Any) -> Any:
    if array.dtype.hasobject or array.dtype.names is not None or array.baseclass is not np.ndarray:
        return array.__reduce_ex__(5)
    mask = array._mask
    return _as_masked, (array.data, mask if mask.ndim else None, array._fill_value, array.hardmask)


def _as_masked(data: np.ndarray, mask: np.ndarray | None, fill: Any, hard: bool) -> np.ndarray:
    mask_or_none = np.ma.nomask if mask is None else mask
    array: np.ndarray = np.ma.MaskedArray(data, mask_or_none, copy=False, hard_mask=hard)
    array._fill_value = fill  # type: ignore[attr-defined]  # the setter would convert it
    return array


def _reduce_image(image: Any) -> Any:
    """Reduce an image of PIL, whose own state holds its pixels last."""
    *state, pixels = image.__getstate__()
    if not isinstance(pixels, bytes):
        return image.__reduce_ex__(5)
    return _as_image, (type(image), state, PickleBuffer(pixels))


def _as_image(kind: Any, state: list[Any], pixels: Any) -> Any:
    image: Any = kind.__new__(kind)
    image.__setstate__([*state, pixels])
    return image


_BY_NAME: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("PIL.Image", "Image"): _reduce_image,
    ("torch", "Tensor"): reduce_tensor,
    ("numpy.ma", "MaskedArray"): _reduce_masked,
    ("numpy.ma.core", "MaskedArray"): _reduce_masked,
}


# --- small arrays ---------------------------------------------------------------------------------

# Arrays of an item share memory up to so many bytes. One that is kept alone wastes no more.
_SHARED_BYTES = 512
# A source of more layouts, such as one of texts of any length, gains nothing.
_MAX_LAYOUTS = 256
# Bytes: enough for every dtype.
_ALIGNMENT = 16

_ndarray = np.ndarray
_Pack = Callable[..., bytes]


class Layouts:
    """Encode items by the layouts that were seen before; for one thread."""

    def __init__(self) -> None:
        # None for items that are left to pickle.
        self._known: dict[tuple[Any, ...], tuple[bytes, _Pack, bool] | None] = {}

    def encode(self, value: Any) -> tuple[bytes, bytes] | None:
        """Return the layout and the bytes of an item; None if pickle is to encode it."""
        container = type(value)
        key: list[Any]
        if container is dict:
            arrays, key = value.values(), [*value]
            for name in key:
                if type(name) is not str:
                    return None
        elif container is tuple or container is list:
            arrays, key = value, [container]
        else:
            return None
        for array in arrays:
            # Pickle keeps a read-only array read-only, and the metadata of a dtype. One that is
            # contiguous needs no strides in the key.
            if type(array) is not _ndarray or not array.flags.carray:
                return None
            dtype = array.dtype
            if dtype.metadata is not None:
                return None
            key += dtype, array.shape
        build = tuple(key)
        try:
            known = self._known[build]
        except KeyError:
            known = self._add(build, value)
        if known is None:
            return None
        layout, pack, are_alike = known
        # Pickle keeps an array that an item holds twice one array.
        if are_alike and len({*map(id, arrays)}) < len(arrays):
            return None
        return layout, pack(*[array.tobytes() for array in arrays])

    def _add(self, build: tuple[Any, ...], value: Any) -> tuple[bytes, _Pack, bool] | None:
        if len(self._known) == _MAX_LAYOUTS:
            return None
        arrays = [*(value.values() if type(value) is dict else value)]
        known = None
        if arrays and all(map(_is_plain, arrays)):
            sizes = [_aligned(array.nbytes) for array in arrays]
            forms = [(array.shape, portable_dtypes[array.dtype]) for array in arrays]
            layout = pickle.dumps((type(value), [*value] if type(value) is dict else None, forms))
            # A larger item goes into a block, as a pickle, which takes three times as long for many
            # arrays.
            if len(layout) + sum(sizes) <= INLINE_BYTES:
                pack = struct.Struct("".join(f"{size}s" for size in sizes)).pack
                known = layout, pack, len(forms) > len({*forms})
        self._known[build] = known
        return known


def decode_arrays(layout: bytes, data: memoryview) -> Any:
    """Return the item that was encoded; its arrays have memory of their own."""
    return _builder(layout)(data)


@functools.lru_cache(_MAX_LAYOUTS)
def _builder(layout: bytes) -> Callable[[memoryview], Any]:
    """Return a function that makes an item of its bytes."""
    container, names, forms = pickle.loads(layout)
    sizes = [math.prod(shape) * np.dtype(form).itemsize for shape, form in forms]
    ends = list(itertools.accumulate(_aligned(size) for size in sizes))
    fields = [f"f{number}" for number in range(len(forms))]
    # A view of a field takes less time than an array that is made of a dtype and a shape.
    record = np.dtype(
        {
            "names": fields,
            "formats": [(form, shape) for shape, form in forms],
            "offsets": [0, *ends[:-1]],
            "itemsize": ends[-1],
        }
    )
    is_shared = ends[-1] <= _SHARED_BYTES

    def arrays(data: memoryview) -> list[np.ndarray]:
        whole = np.ndarray((), record, bytearray(data))
        return [whole[field] if is_shared else whole[field].copy() for field in fields]

    if names is None:
        return arrays if container is list else lambda data: tuple(arrays(data))
    if not is_shared:
        return lambda data: dict(zip(names, arrays(data), strict=True))
    places = list(zip(names, fields, strict=True))

    def mapping(data: memoryview) -> dict[str, np.ndarray]:
        whole = np.ndarray((), record, bytearray(data))
        return {name: whole[field] for name, field in places}

    return mapping


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_plain(array: np.ndarray) -> bool:
    """Return whether a contiguous array is known by its bytes, its shape and its dtype's name."""
    return bool(portable_dtypes[array.dtype]) and array.nbytes > 0

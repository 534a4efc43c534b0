"""Reading objects: metadata parsed once, all the arrays a caller needs in one go."""

import json
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from zarr.core.sync import sync
from zarr.storage import StorePath

from megafold.cache_store.content import Content
from megafold.cache_store.digest import JSON, Digest
from megafold.cache_store.errors import CorruptObject, MissingArray, MissingObject
from megafold.cache_store.zarr_file import BadFile, SerialArray, ZippedGroup

#: What to read of one array: everything, or along each axis a slice (step 1) or integer indices. Indices
#: select orthogonally, in the order given, repeats allowed; axes left out are read whole.
Selection: TypeAlias = "tuple[slice | NDArray[Any], ...] | None"

T = TypeVar("T")


class ObjectReader:
    """An open object. A context manager; pickles as its path and opens again wherever it is unpickled.

    The file is opened at the first use in each process, so a reader survives fork and spawn. Threads may
    share one.
    """

    def __init__(self, path: Path | str, digest: Digest, data: bytes | None = None) -> None:
        """``data``: the file's bytes, for one in memory; ``path`` is then its name in messages."""
        self.path = path
        self.digest = digest
        self._data = data
        self._state: OpenObject | None = None
        self._closed = False

    def __reduce__(self) -> tuple[object, ...]:
        return (ObjectReader, (self.path, self.digest, self._data))

    def __repr__(self) -> str:
        return f"ObjectReader({str(self.path)!r})"

    def __enter__(self) -> "ObjectReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file now. Reading afterwards raises ValueError; closing twice is allowed."""
        self._closed = True
        state, self._state = self._state, None
        if state is not None:
            state.store.close()

    @property
    def attributes(self) -> dict[str, JSON]:
        """The object's attributes: the parsed mapping itself, not to be changed."""
        return self._open().attributes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array."""
        return {name: tuple(meta["shape"]) for name, meta in self._open().metadata.items()}

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Dtype of each array."""
        return {name: np.dtype(meta["data_type"]) for name, meta in self._open().metadata.items()}

    @property
    def chunks(self) -> dict[str, tuple[int, ...]]:
        """Chunk shape of each array."""
        metadata = self._open().metadata
        return {
            name: tuple(meta["chunk_grid"]["configuration"]["chunk_shape"]) for name, meta in metadata.items()
        }

    def read(self, selections: Mapping[str, Selection]) -> dict[str, NDArray[Any]]:
        """Read several arrays, or parts of them, at once.

        Raises:
            MissingArray: no such array; a KeyError, too.
            IndexError: a selection does not fit its array.
            CorruptObject: what was read is damaged.
            MissingObject: the file has gone.
        """
        return read_many([(self, selections)])[0]

    def read_all(self) -> Content:
        """Everything the object holds."""
        names = list(self._open().metadata)
        return Content(arrays=self.read(dict.fromkeys(names)), attributes=self.attributes, chunks=self.chunks)

    def renew(self) -> bool:
        """Get the object anew, after damage showed. False: there is nowhere to get it from."""
        return False

    def _open(self) -> "OpenObject":
        state = self._state
        if state is None or state.pid != os.getpid():
            if self._closed:
                raise ValueError(f"the reader of {self.digest} is closed")
            state = self._state = self._opened()
        return state

    def _opened(self) -> "OpenObject":
        return OpenObject(self.path, self.digest, self._data)


class OpenObject:
    """What one process holds of an open object.

    Raises:
        MissingObject: there is no file.
        CorruptObject: it is damaged.
    """

    def __init__(self, path: Path | str, digest: Digest, data: bytes | None = None) -> None:
        self.pid = os.getpid()
        try:
            self.store = ZippedGroup(path, data)
        except FileNotFoundError as error:
            raise MissingObject(digest, path, "no such object") from error
        except BadFile as error:
            raise CorruptObject(digest, path, str(error)) from error
        try:
            group = json.loads(bytes(self.store.read_checked("zarr.json")))
            self.attributes: dict[str, JSON] = group["attributes"]
            self.metadata: dict[str, dict[str, Any]] = group["consolidated_metadata"]["metadata"]
        except (BadFile, OSError, ValueError, KeyError, TypeError) as error:
            self.store.close()
            raise CorruptObject(digest, path, f"zarr.json cannot be read: {error!r}") from error
        self.digest = digest
        self._arrays: dict[str, SerialArray] = {}

    def array(self, name: str) -> SerialArray:
        """An array of the object. Raises MissingArray, CorruptObject."""
        array = self._arrays.get(name)
        if array is None:
            if name not in self.metadata:
                reason = f"no array {name!r}, it has {', '.join(self.metadata)}"
                raise MissingArray(self.digest, self.store.path, reason)
            try:
                array = self._arrays[name] = SerialArray(self.metadata[name], StorePath(self.store, name))
            except (ValueError, TypeError, KeyError) as error:
                reason = f"the metadata of array {name} cannot be read: {error!r}"
                raise CorruptObject(self.digest, self.store.path, reason) from error
        return array


def read_many(
    requests: Sequence[tuple[ObjectReader, Mapping[str, Selection]]],
) -> list[dict[str, NDArray[Any]]]:
    """Read from several objects at once: one item a request, in order.

    Raises:
        As :meth:`ObjectReader.read`.
    """
    return run(lambda: _read_many(requests))


async def _read_many(
    requests: Iterable[tuple[ObjectReader, Mapping[str, Selection]]],
) -> list[dict[str, NDArray[Any]]]:
    results = []
    for reader, selections in requests:
        try:
            results.append(await _read_object(reader, selections))
        except CorruptObject:
            if not reader.renew():
                raise
            results.append(await _read_object(reader, selections))
    return results


async def _read_object(reader: ObjectReader, selections: Mapping[str, Selection]) -> dict[str, NDArray[Any]]:
    state = reader._open()
    arrays = {}
    for name, selection in selections.items():
        array = state.array(name)
        checked = _checked(reader, name, selection, array.shape)
        try:
            arrays[name] = await _read(array, checked)
        except (BadFile, OSError) as error:
            raise CorruptObject(reader.digest, state.store.path, f"array {name}: {error}") from error
    return arrays


async def _read(array: SerialArray, selection: Selection) -> NDArray[Any]:
    if selection is None:
        return np.asarray(await array.getitem(()))
    axis = next((axis for axis, item in enumerate(selection) if not isinstance(item, slice)), None)
    if axis is None:
        return np.asarray(await array.getitem(selection))  # type: ignore[arg-type]
    return await _read_indexed(array, selection, axis)


async def _read_indexed(
    array: SerialArray, selection: tuple[slice | NDArray[Any], ...], axis: int
) -> NDArray[Any]:
    """Read with indices along ``axis`` and perhaps further axes.

    Chunks that hold a wanted index are read as a run of neighbours and gathered from with NumPy. (zarr's
    own orthogonal selection gathers element by element, which for wide rows costs more than decompressing.)
    """
    indices = np.asarray(selection[axis])
    spans = [item if isinstance(item, slice) else _span(item) for item in selection]
    shape = tuple(len(range(*span.indices(length))) for span, length in zip(spans, array.shape, strict=True))
    out = np.empty((*shape[:axis], len(indices), *shape[axis + 1 :]), array.dtype)
    chunk_of = indices // array.chunks[axis]
    wanted = np.unique(chunk_of)
    runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1) if out.size else []
    for run in runs:
        places = np.flatnonzero((chunk_of >= run[0]) & (chunk_of <= run[-1]))
        here = indices[places]
        span = _span(here)
        block = np.asarray(await array.getitem((*spans[:axis], span, *spans[axis + 1 :])))
        _gather(block, here - span.start, out, places, axis)
    for later in range(axis + 1, len(selection)):
        item = selection[later]
        if not isinstance(item, slice):
            out = out.take(item - spans[later].start, later)
    return out


def _gather(
    block: NDArray[Any], indices: NDArray[Any], out: NDArray[Any], places: NDArray[Any], axis: int
) -> None:
    """Copy ``block`` at ``indices`` along an axis to ``out`` at ascending ``places``."""
    before: tuple[Any, ...] = (slice(None),) * axis
    if places[-1] - places[0] == len(places) - 1:
        target = out[(*before, _span(places))]
        # The indices are in range; with the default mode NumPy would fill a buffer first.
        np.take(block, indices, axis, out=target, mode="clip")
    else:
        out[(*before, places)] = block.take(indices, axis)


def _span(indices: NDArray[Any]) -> slice:
    """The slice from the smallest to the largest index."""
    return slice(int(indices.min()), int(indices.max()) + 1) if len(indices) else slice(0, 0)


def _checked(reader: ObjectReader, name: str, selection: Selection, shape: tuple[int, ...]) -> Selection:
    """``selection`` over every axis, its indices non-negative.

    Raises:
        IndexError: it does not fit ``shape``.
    """
    if selection is None or not shape:
        if selection:
            raise IndexError(f"array {name} of {reader.digest} has no axes, so none to select along")
        return None
    if len(selection) > len(shape):
        raise IndexError(f"array {name} of {reader.digest}: {len(selection)} selections, shape {shape}")
    checked: list[slice | NDArray[Any]] = []
    for axis, length in enumerate(shape):
        item = selection[axis] if axis < len(selection) else slice(None)
        if isinstance(item, slice):
            if item.step not in (None, 1):
                raise IndexError(f"array {name} of {reader.digest}, axis {axis}: slices have step 1")
            checked.append(slice(*item.indices(length)))
            continue
        indices = np.asarray(item)
        if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
            raise IndexError(
                f"array {name} of {reader.digest}, axis {axis}: select with slices or 1-d integer indices"
            )
        indices = indices.astype(np.int64)
        if indices.size and (indices.min() < -length or indices.max() >= length):
            raise IndexError(
                f"array {name} of {reader.digest}, axis {axis}: index out of range for length {length}"
            )
        indices = np.where(indices < 0, indices + length, indices)
        # A run of neighbours, as in a contiguous crop, is read without gathering.
        checked.append(_span(indices) if (np.diff(indices) == 1).all() else indices)
    return tuple(checked)


def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine of zarr's.

    Over a :class:`ZippedGroup` with the serial pipeline no coroutine waits for anything, so it runs to its
    end right here. Where a version of zarr waits, or asks for an event loop, zarr's own loop runs it anew.
    """
    coroutine = make()
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    except RuntimeError:  # no event loop is running
        pass
    coroutine.close()
    return sync(make())

"""Functions whose host work is done once for each kind of arguments.

An operator decides on tiles, makes room, takes views and launches. That lasts several times as long as the
launches alone, and comes out the same whenever shapes, strides and dtypes are the same. A :class:`Remembered`
function is watched while it runs on arguments of a kind that it has met before. What it did is kept as steps:
memory taken, kernels launched on addresses in it, operators of PyTorch. Later calls of that kind take these.

For its steps to mean what it means, such a function

- does the same whatever the values in its tensors are,
- writes to no tensor that it is given,
- depends on nothing beside the key (:meth:`Remembered.__call__`) but what :func:`forget` is called for.

A function that uses memory of which nobody can tell where it comes from is not remembered and runs as it is
each time. Steps hold no memory between calls.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafold.trainer.kernels.launch import Launch, Start, current_device, current_stream, watched

aten = torch.ops.aten

#: Kinds of arguments remembered for a function; beyond it the memory starts anew.
_MOST_KINDS: Final = 1024
#: Tensors up to this size that do not outlive a call share one piece of memory.
_SHARED_BYTES: Final = 16 * 2**20
#: Where tensors begin in the shared memory: as PyTorch's own begin.
_GRAIN: Final = 512
#: What kernels are compiled for beside dtypes: addresses are multiples of it.
_ALIGNMENT: Final = 16
#: Slot of a tensor without elements: the last one, whose address is 0.
_NOWHERE: Final = -1

_MAKES_ROOM: Final = frozenset({
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty.default, aten.new_empty_strided.default,
})  # fmt: skip
#: Entries of PyTorch that take the same arguments and less time than an operator called by its overload.
_ENTRIES: Final[dict[Any, Callable[..., Any]]] = {
    aten.mm.default: torch.mm, aten.mm.out: torch.mm, aten.bmm.default: torch.bmm, aten.bmm.out: torch.bmm,
    aten.addmm.default: torch.addmm, aten.add.Tensor: torch.add, aten.sum.dim_IntList: torch.sum,
    aten.sum.IntList_out: torch.sum, aten.copy_.default: Tensor.copy_,
}  # fmt: skip

#: Tensors by slot, None where there is none, yet or any more; likewise their addresses, and the stream.
Tensors = list[Tensor | None]
Step = Callable[[Tensors, list[int], int], None]
View = Callable[[Tensors], Tensor]


class _Layout(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """From the first element to the last."""
        if 0 in self.size:
            return 0
        reach = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return (reach + 1) * self.dtype.itemsize


class _Place(NamedTuple):
    """Where a tensor lies: bytes beyond the beginning of a slot, and its layout."""

    slot: int
    offset: int
    layout: _Layout


class _Launched(NamedTuple):
    launch: Launch
    start: Start | None
    places: list[_Place]


class _Operated(NamedTuple):
    """An operator of PyTorch; ``arguments`` have places for tensors. ``made``: the slot of its result."""

    function: Callable[..., Any]
    arguments: list[Any]
    options: dict[str, Any]
    made: int | None


class _Room(NamedTuple):
    """Memory of a slot that was there before the event of this number, taken by it or for it."""

    before: int
    layout: _Layout


def _layout(t: Tensor) -> _Layout:
    return _Layout(t.dtype, tuple(t.shape), t.stride())


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    """Those among arguments and in lists among them."""
    found = []
    for each in arguments:
        found += [each] if isinstance(each, Tensor) else []
        found += [t for t in each if isinstance(t, Tensor)] if isinstance(each, list | tuple) else []
    return found


class _Watching(TorchDispatchMode):
    """Within: notes all that this thread does to tensors. Slots: first the inputs', then those of rooms."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.layouts = [_layout(t) for t in inputs]
        self.rooms: dict[int, _Room] = {}
        self.events: list[_Launched | _Operated] = []
        #: Something was done that steps cannot repeat.
        self.lost = False
        self._beginnings = [t.data_ptr() for t in inputs]
        #: The slot of the memory that began at an address most recently.
        self._slots: dict[int, int] = {}

    def __enter__(self) -> "_Watching":
        watched.watcher = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        watched.watcher = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        # What Triton does itself, in the interpreter, is no part of it.
        if watched.launching:
            return func(*args, **options)
        given = _tensors([*args, *options.values()])
        storages = {t.untyped_storage().data_ptr() for t in given}
        result = func(*args, **options)
        made = _tensors([result])
        if func in _MAKES_ROOM:
            self._take(result)
        elif func._schema.is_mutable:
            self._operated(func, args, options, None)
        elif any(t.untyped_storage().data_ptr() not in storages for t in made):
            self._operated(func, args, options, result)
        elif given and not made:
            self.lost = True  # A value was read, or the result is no tensor.
        return result

    def launched(self, launch: Launch, tensors: Sequence[Tensor], start: Start | None) -> None:
        """See :class:`megafold.trainer.kernels.launch.Watcher`."""
        self.events.append(_Launched(launch, start, [self.place(t) for t in tensors]))

    def place(self, t: Tensor) -> _Place:
        """Where a tensor of this call lies."""
        layout, address, storage = _layout(t), t.data_ptr(), t.untyped_storage()
        if t.numel() == 0:
            return _Place(_NOWHERE, 0, layout)
        if address in self._beginnings:
            return _Place(self._beginnings.index(address), 0, layout)
        slot = self._slots.get(storage.data_ptr())
        if slot is not None:
            return _Place(slot, address - storage.data_ptr(), layout)
        within = [
            (i, address - beginning)
            for i, (beginning, own) in enumerate(zip(self._beginnings, self.layouts, strict=False))
            if beginning < address < beginning + own.bytes
        ]
        # Inputs may lie in each other's gaps: what is part of which would be a guess.
        if len(within) != 1:
            self.lost = True
            return _Place(_NOWHERE, 0, layout)
        return _Place(*within[0], layout)

    def _take(self, t: Tensor) -> int:
        """A slot for what now begins where a tensor does that was not there before."""
        slot = len(self.layouts)
        self.layouts.append(_layout(t))
        self.rooms[slot] = _Room(len(self.events), self.layouts[slot])
        self._slots[t.untyped_storage().data_ptr()] = slot
        return slot

    def _operated(self, func: Any, args: Sequence[Any], options: dict[str, Any], made: Any) -> None:
        if made is not None and not isinstance(made, Tensor):
            self.lost = True  # Several results: none of our functions has need of it.
            return
        arguments, named = self._placed(args), dict(zip(options, self._placed(options.values()), strict=True))
        function = _ENTRIES.get(func, func)
        if func is aten._to_copy.default and list(options) == ["dtype"]:
            function, arguments, named = Tensor.to, [*arguments, options["dtype"]], {}
        slot = None if made is None else self._take(made)
        self.events.append(_Operated(function, arguments, named, slot))

    def _placed(self, arguments: Iterable[Any]) -> list[Any]:
        return [
            self.place(each) if isinstance(each, Tensor)
            else self._placed(each) if isinstance(each, list | tuple)
            else each
            for each in arguments
        ]  # fmt: skip


class _Steps:
    """What a function did, to be done again with other tensors of the same layouts.

    Attributes:
        kind: a number of its own.
    """

    def __init__(self, watching: _Watching, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self.kind = next(_kinds)
        self._device = inputs[0].device
        self._index = inputs[0].get_device()
        self._layouts, self._rooms = watching.layouts, watching.rooms
        places = [watching.place(t) for t in results]
        self._last_use = self._uses(watching.events, places)
        self._offsets, shared_bytes = self._share(watching.events, places)
        #: Slots after the inputs', the last two of them: the shared memory's, and nowhere.
        self._blank = len(self._layouts) - len(inputs) + 2
        self._shared_slot = len(self._layouts)
        self._steps: list[Step] = []
        self._operates = any(isinstance(event, _Operated) for event in watching.events)
        if shared_bytes:
            self._layouts.append(_Layout(torch.uint8, (shared_bytes,), (1,)))
            self._steps.append(self._taking(self._shared_slot))
        self._write(watching.events)
        self._results = [self._view(place) for place in places]

    def __call__(self, inputs: Sequence[Tensor], addresses: Sequence[int]) -> list[Tensor]:
        """The function's results for ``inputs``, which begin at ``addresses``."""
        if self._index >= 0 and self._index != current_device():
            with torch.cuda.device(self._index):
                return self(inputs, addresses)
        blank = self._blank
        tensors, begin = [*inputs, *[None] * blank], [*addresses, *[0] * blank]
        stream = current_stream(self._index)
        if self._operates:
            # Casts that autocast asked for are steps of their own.
            with torch._C._DisableAutocast():
                for step in self._steps:
                    step(tensors, begin, stream)
        else:
            for step in self._steps:
                step(tensors, begin, stream)
        return [view(tensors) for view in self._results]

    def _uses(self, events: Sequence[Any], results: Sequence[_Place]) -> dict[int, int]:
        """The number of the last event that uses each slot; of a result: beyond all."""
        last = {slot: room.before for slot, room in self._rooms.items()}
        for number, event in enumerate(events):
            places = event.places if isinstance(event, _Launched) else _places(event)
            last |= {place.slot: number for place in places}
        return last | {place.slot: len(events) for place in results}

    def _share(self, events: Sequence[Any], results: Sequence[_Place]) -> tuple[dict[int, int], int]:
        """Where those slots lie in the shared memory that lie there, and how large it is.

        None of those that PyTorch's operators take as tensors, that outlive the call, or are large: these are
        taken and given back one by one, as the function did.
        """
        apart = {place.slot for place in results}
        for event in events:
            if isinstance(event, _Operated):
                apart |= {event.made, *[place.slot for place in _places(event)]}  # type: ignore[arg-type]
        offsets: dict[int, int] = {}
        end = 0
        sharing = {slot: room for slot, room in self._rooms.items()
                   if slot not in apart and 0 < room.layout.bytes <= _SHARED_BYTES}  # fmt: skip
        for slot in sorted(sharing, key=lambda slot: -sharing[slot].layout.bytes):
            offset = 0
            for other in sorted(offsets, key=lambda slot: offsets[slot]):
                together = (
                    self._rooms[slot].before <= self._last_use[other]
                    and self._rooms[other].before <= self._last_use[slot]
                )
                if together and offset + self._grains(slot) > offsets[other]:
                    offset = max(offset, offsets[other] + self._grains(other))
            offsets[slot] = offset
            end = max(end, offset + self._grains(slot))
        return offsets, end

    def _grains(self, slot: int) -> int:
        return -(-self._rooms[slot].layout.bytes // _GRAIN) * _GRAIN

    def _write(self, events: Sequence[Any]) -> None:
        """The steps of the events, with memory taken before and given back after them."""
        operated = {event.made for event in events if isinstance(event, _Operated)}
        apart = [slot for slot, room in self._rooms.items()
                 if slot not in self._offsets and slot not in operated and room.layout.bytes]  # fmt: skip
        for number, event in enumerate([*events, None]):
            self._steps += [self._taking(slot) for slot in apart if self._rooms[slot].before == number]
            if event is None:
                break
            self._steps.append(self._launching(event) if isinstance(event, _Launched) else self._doing(event))
            over = [slot for slot, last in self._last_use.items() if last == number]
            done = [slot for slot in over if slot in self._rooms and slot not in self._offsets]
            if done:
                self._steps.append(_giving_back(done))

    def _taking(self, slot: int) -> Step:
        dtype, size, stride = self._layouts[slot]
        device, empty = self._device, torch.empty_strided

        def take(tensors: Tensors, begin: list[int], stream: int) -> None:
            tensors[slot] = t = empty(size, stride, dtype=dtype, device=device)
            begin[slot] = t.data_ptr()

        return take

    def _launching(self, event: _Launched) -> Step:
        start, launch = event.start, event.launch
        if start is None:
            views = [self._view(place) for place in event.places]
            return lambda tensors, begin, stream: launch(*[view(tensors) for view in views])
        where = [self._where(place) for place in event.places]
        return lambda tensors, begin, stream: start(stream, [begin[slot] + offset for slot, offset in where])

    def _doing(self, event: _Operated) -> Step:
        function, made = event.function, event.made
        arguments, options = self._reading(event.arguments), self._reading(event.options.values())
        names = tuple(event.options)

        def operate(tensors: Tensors, begin: list[int], stream: int) -> None:
            named = dict(zip(names, options(tensors), strict=True)) if names else {}
            result = function(*arguments(tensors), **named)
            if made is not None:
                tensors[made] = result
                begin[made] = result.data_ptr()

        return operate

    def _reading(self, arguments: Iterable[Any]) -> Callable[[Tensors], list[Any]]:
        """Arguments of an operator, from the tensors."""
        readers: list[Callable[[Tensors], Any]] = []
        for each in arguments:
            if isinstance(each, _Place):
                readers.append(self._view(each))
            elif isinstance(each, list):
                readers.append(self._reading(each))
            else:
                readers.append(lambda _, value=each: value)  # type: ignore[misc]
        return lambda tensors: [read(tensors) for read in readers]

    def _where(self, place: _Place) -> tuple[int, int]:
        """Slot and offset, in the shared memory of what lies there."""
        offset = self._offsets.get(place.slot)
        return (place.slot, place.offset) if offset is None else (self._shared_slot, offset + place.offset)

    def _view(self, place: _Place) -> View:
        """The tensor that lies at a place."""
        dtype, size, stride = place.layout
        slot, offset = self._where(place)
        if slot == _NOWHERE:
            nothing = torch.empty_strided(size, stride, dtype=dtype, device=self._device)
            return lambda _: nothing
        if offset == 0 and place.layout == self._layouts[slot]:
            return lambda tensors: tensors[slot]  # type: ignore[return-value]
        same, skipped = dtype == self._layouts[slot].dtype, offset // dtype.itemsize

        def part(tensors: Tensors) -> Tensor:
            whole: Tensor = tensors[slot]  # type: ignore[assignment]
            if not same:
                whole = whole.view(dtype)
            return whole.as_strided(size, stride, whole.storage_offset() + skipped)

        return part


_kinds = itertools.count()
_everything: list[dict[Hashable, "_Steps | None"]] = []


def _places(event: _Operated) -> list[_Place]:
    found: list[_Place] = []
    for each in (*event.arguments, *event.options.values()):
        if isinstance(each, _Place):
            found.append(each)
        elif isinstance(each, list):
            found += [place for place in each if isinstance(place, _Place)]
    return found


def _giving_back(slots: Sequence[int]) -> Step:
    def give_back(tensors: Tensors, begin: list[int], stream: int) -> None:
        for slot in slots:
            tensors[slot] = None

    return give_back


def _look(t: Tensor | None) -> Hashable:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % _ALIGNMENT)


class Outcome(NamedTuple):
    """What a :class:`Remembered` function gave.

    Attributes:
        results: the function's.
        kind: stands for all layouts of arguments and results; None: not known.
    """

    results: Sequence[Tensor]
    kind: int | None


class Remembered:
    """``function``, from tensors (or None) and settings to a sequence of tensors, with its steps remembered.

    Of a result without elements its steps give the same tensor each time.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]]) -> None:
        self._function = function
        self._known: dict[Hashable, _Steps | None] = {}
        _everything.append(self._known)
        self._met: set[Hashable] = set()

    def __call__(
        self, tensors: Sequence[Tensor | None], settings: tuple[Hashable, ...],
        kept: Sequence[Tensor | None] = (), follows: int | None = None,
    ) -> Outcome:  # fmt: skip
        """``function(*tensors, *kept, *settings)``.

        Args:
            tensors: all on one device; the first is there.
            settings: all else that decides what the function does, but for PyTorch's deterministic mode and
                the precision of float32 products, which are looked at here.
            kept: more tensors. If they are arguments and results of a call of another such function, always
                the same ones of them, they need not be looked at:
            follows: that call's kind.
        """
        inputs = [t for t in (*tensors, *kept) if t is not None]
        addresses = [t.data_ptr() for t in inputs]
        looked_at = (*tensors, *kept) if follows is None else tensors
        key = (
            follows, settings, inputs[0].get_device(), torch.are_deterministic_algorithms_enabled(),
            torch._C._get_cublas_allow_tf32(), len(set(addresses)), *[_look(t) for t in looked_at],
        )  # fmt: skip
        steps = self._known.get(key)
        if steps is not None:
            return Outcome(steps(inputs, addresses), steps.kind)
        if key in self._known or watched.watcher is not None or (follows is None and self._is_new(key)):
            return Outcome(self._function(*tensors, *kept, *settings), None)
        with _Watching(inputs) as watching:
            results = self._function(*tensors, *kept, *settings)
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
        # Equal addresses: whose memory is whose would be a guess.
        if not watching.lost and len(set(addresses)) == len(addresses):
            steps = _Steps(watching, inputs, results)
        self._known[key] = None if watching.lost else steps
        return Outcome(results, None if watching.lost or steps is None else steps.kind)

    def _is_new(self, key: Hashable) -> bool:
        """Whether no call was of this kind: one may remain the only one."""
        if key in self._met:
            return False
        if len(self._met) >= _MOST_KINDS:
            self._met.clear()
        self._met.add(key)
        return True


def forget() -> None:
    """Watch all functions anew: for whoever changes what decides about launches, as the tables of tiles."""
    for known in _everything:
        known.clear()

"""DCP's ``.metadata`` is a pickle; this reads it without trusting it. Pure: torch is not needed.

Only the names that DCP itself writes are resolved, to torch's own classes when ``torch_classes`` gives them, else
to inert stand-ins. Any other name raises ``Unsafe`` before anything of it runs.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ckpt.errors import Damaged, Unsafe
from ckpt.format.boxes import Box
from ckpt.format.fields import DTYPE_BYTES, MAX_BYTES

_MANY = 100  # more fields or dimensions than anything in DCP's metadata has
_META = "torch.distributed.checkpoint.metadata"
ALLOWED: dict[tuple[str, str], None] = dict.fromkeys(
    [
        (_META, "Metadata"),
        (_META, "MetadataIndex"),
        (_META, "TensorStorageMetadata"),
        (_META, "BytesStorageMetadata"),
        (_META, "ChunkStorageMetadata"),
        (_META, "TensorProperties"),
        (_META, "StorageMeta"),
        (_META, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch._C", "layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("collections", "OrderedDict"),
    ]
)


class StandIn:
    """What a class of the allow-list becomes without torch: it holds its state and does nothing."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _must(not isinstance(state, dict) or len(state) < _MANY)  # a copy: many of a large one would fill the memory
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def _key(self) -> tuple[str, str, tuple[int, ...] | None]:
        fqn, offset = getattr(self, "fqn", None), getattr(self, "offset", None)
        if not isinstance(fqn, str) or not (offset is None or _is_sizes(offset)):
            raise TypeError("only an index of DCP can be a key")
        return type(self).__name__, fqn, offset

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StandIn) and self._key() == other._key())


@dataclass(frozen=True, slots=True)
class Contents:
    """What ``.metadata`` says, in plain types.

    ``tensors`` are (dtype, shape); ``places`` are (object, start, length) in bytes by (key, offsets of the chunk,
    None for a value). ``chunks`` are (offsets, sizes) in elements; ``paths`` are the nested keys of each entry;
    ``transformed`` are entries whose bytes went through an extension before they were stored.
    """

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    values: tuple[str, ...]
    places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
    chunks: dict[str, tuple[Box, ...]] = field(default_factory=dict, compare=False)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict, compare=False)
    transformed: tuple[str, ...] = field(default=(), compare=False)


def read(data: bytes, where: str, torch_classes: Callable[[str, str], Any] | None = None) -> Any:
    """Decode ``.metadata``; ``torch_classes(module, name)`` resolves allowed names to the real classes.

    Without ``torch_classes`` the file needs no trust at all: it is decoded slowly, in memory bounded by its size.
    Raises ``Unsafe`` for a name outside the allow-list, ``Damaged`` for bytes that are no such pickle.
    """
    try:
        if torch_classes is None:
            return _Guarded(io.BytesIO(data), where).load()
        return _Unpickler(io.BytesIO(data), where, torch_classes).load()
    except (Unsafe, MemoryError):
        raise
    except Exception as e:
        raise Damaged(f"{where} cannot be decoded: {type(e).__name__}: {str(e)[:120]}") from None


def read_contents(data: bytes, where: str) -> Contents:
    """Decode ``.metadata`` without torch and without trust. Raises ``Unsafe`` or ``Damaged``."""
    metadata = read(data, where)
    try:
        tensors, values, chunks = {}, [], {}
        for key, md in metadata.state_dict_metadata.items():
            if type(md).__name__ == "TensorStorageMetadata":
                dtype, shape = md.properties.state[0], md.size
                _must(isinstance(key, str) and dtype in DTYPE_BYTES and _is_sizes(shape))
                _must(math.prod(shape) <= MAX_BYTES)
                tensors[key] = (dtype, shape)
                chunks[key] = tuple((c.offsets, c.sizes) for c in md.chunks)
                _must(all(_is_sizes(o) and _is_sizes(n) and len(o) == len(n) == len(shape) for o, n in chunks[key]))
            else:
                _must(isinstance(key, str))
                values.append(key)
        places, transformed = {}, []
        for index, info in (metadata.storage_data or {}).items():
            place = (info.relative_path, info.offset, info.length)
            _must(isinstance(place[0], str) and _is_sizes(place[1:]))
            places[index._key()[1:]] = place
            if getattr(info, "transform_descriptors", None):
                transformed.append(index.fqn)
        paths = {k: p for k, p in (getattr(metadata, "planner_data", None) or {}).items() if _is_path(p)}
    except (AttributeError, TypeError, ValueError, IndexError, KeyError):
        raise Damaged(f"{where} is not laid out as DCP's metadata") from None
    return Contents(tensors, tuple(values), places, chunks, paths, tuple(transformed))


def _must(ok: bool) -> None:
    if not ok:
        raise ValueError


def _is_path(value: Any) -> bool:
    return isinstance(value, tuple) and 0 < len(value) < _MANY and all(type(part) in (str, int) for part in value)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)


def _check_name(module: str, name: str, where: str) -> bool:
    """Whether an allowed name is a dtype. Raises ``Unsafe`` for any other name."""
    is_dtype = module == "torch" and name in DTYPE_BYTES  # torch.load and friends are names of torch too
    if (module, name) not in ALLOWED and not is_dtype:
        raise Unsafe(f"{where} asks for {f'{module}.{name}'[:200]!r}, which is not on the allow-list")
    return is_dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, f: io.BytesIO, where: str, resolve: Callable[[str, str], Any]) -> None:
        super().__init__(f)
        self._where, self._resolve = where, resolve

    def find_class(self, module: str, name: str) -> Any:
        _check_name(module, name, self._where)
        return self._resolve(module, name)


def _size(dims: Any) -> tuple[Any, ...]:
    _must(len(dims) < _MANY)
    return tuple(dims)


def _path(*parts: str) -> PurePosixPath:
    _must(sum(map(len, parts)) < 4096)
    return PurePosixPath(*parts)


def _empty_dict() -> dict[Any, Any]:
    return {}


_STAND_INS: dict[tuple[str, str], Any] = {
    **{name: type(name[1], (StandIn,), {}) for name in ALLOWED},
    ("torch", "Size"): _size,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("collections", "OrderedDict"): _empty_dict,
}
_OPCODES = (  # names in pickle
    "PROTO FRAME STOP MARK POP POP_MARK MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES EMPTY_TUPLE "
    "TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT EMPTY_SET SETITEM SETITEMS ADDITEMS GLOBAL "
    "STACK_GLOBAL REDUCE NEWOBJ BUILD"
)
_Machine: Any = pickle._Unpickler  # the one in Python: its steps can be replaced


class _Guarded(_Machine):  # type: ignore[misc]
    """Runs only what DCP's metadata consists of.

    The machine in C may be told by eight bytes to allocate gigabytes (a memo number), and a key that is a tuple in
    a tuple in … overflows its stack when it is hashed.
    """

    def __init__(self, f: io.BytesIO, where: str) -> None:
        super().__init__(f)
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        return name if _check_name(module, name, self._where) else _STAND_INS[module, name]

    def _set_items(self) -> None:
        items = self.pop_mark()
        _check_keys(items[::2])
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        _check_keys(self.stack[-2:-1])
        _Machine.load_setitem(self)

    def _add_items(self) -> None:
        items = self.pop_mark()
        _check_keys(items)
        self.stack[-1].update(items)

    def _build(self) -> None:
        state = self.stack.pop()
        _must(isinstance(self.stack[-1], StandIn))
        self.stack[-1].__setstate__(state)

    def _unknown(self) -> None:
        raise ValueError("an instruction that DCP never writes")

    dispatch = dict.fromkeys(range(256), _unknown) | {
        getattr(pickle, op)[0]: _Machine.dispatch[getattr(pickle, op)[0]] for op in _OPCODES.split()
    }
    dispatch |= {pickle.SETITEMS[0]: _set_items, pickle.SETITEM[0]: _set_item, pickle.ADDITEMS[0]: _add_items,
                 pickle.BUILD[0]: _build}  # fmt: skip


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        flat = isinstance(key, (str, int, StandIn)) or (
            isinstance(key, tuple) and all(isinstance(part, (str, int)) for part in key)
        )
        if not flat:
            raise TypeError(f"a {type(key).__name__} as a key")

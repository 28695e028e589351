"""The pickle inside a ``torch.save`` frame, read without trust: plain data, and where its tensors lie. Pure.

torch's own ``weights_only`` reader has an allow-list too, but any import can lengthen that one
(``add_safe_globals``) and DCP's default planner does not use it. Nothing is called here but what stands below.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import Any

from ckpt.errors import Damaged, Unsafe
from ckpt.format import zipframe
from ckpt.format.fields import DTYPE_BYTES, MAX_BYTES

MAX_PICKLE_BYTES = 1 << 28
_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a frame: the record ``data/<key>`` holds ``numel`` elements; offset and stride are in elements."""

    dtype: str
    key: str
    numel: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other in row-major order."""
        want = 1
        for n, s in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and s != want and 0 not in self.shape:
                return False
            want *= n
        return True


def load(data: bytes | memoryview, where: str) -> Any:
    """Decode ``data.pkl``: plain data with a ``Stored`` for each tensor.

    Memory is bounded by the size of ``data``. Raises ``Unsafe`` for a name outside the allow-list, ``Damaged`` for
    bytes that are no such pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise Damaged(f"{where} has a pickle of {len(data)} bytes")
    try:
        return _Guarded(bytes(data), where).load()
    except (Unsafe, MemoryError):
        raise
    except Exception as e:
        raise Damaged(f"{where} cannot be decoded: {type(e).__name__}: {str(e)[:120]}") from None


def check_value(data: bytes | memoryview, where: str) -> None:
    """Check that a value's bytes are a ``torch.save`` frame of plain data and tensors, before anything decodes them.

    Raises ``Unsafe`` for a name outside the allow-list and for what is no such frame, which other readers take for
    a bare pickle.
    """
    view = memoryview(data)
    try:
        found = zipframe.records(lambda lo, hi: view[lo:hi], len(view), where)
        record = zipframe.single(found, "data.pkl", where)
        load(view[record.start : record.start + record.length], where)
    except Unsafe:
        raise
    except Damaged as e:
        raise Unsafe(f"{e.message}: it is not loaded") from None


# --- the machine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Name:
    """A name of the allow-list that is no function: a dtype or a kind of storage."""

    text: str


_OPCODES = (  # names in pickle
    "PROTO STOP MARK POP POP_MARK PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE INT BININT "
    "BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "LIST APPEND APPENDS EMPTY_DICT DICT BINPERSID"
)
_FLAT = (str, int, float, bool, type(None), bytes, complex)
_Machine: Any = pickle._Unpickler  # the one in Python: its steps can be replaced


class _Guarded(_Machine):  # type: ignore[misc]
    """Runs only what a ``torch.save`` of plain data consists of, in memory bounded by the length of the pickle."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where, self._left = where, len(data)

    def _spend(self, n: int) -> None:
        """Copies that calls make are paid from the pickle's length: many of one large object would fill the memory."""
        self._left -= n
        if self._left < 0:
            raise ValueError("it asks for more memory than it is long")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name in DTYPE_BYTES or name in _STORAGES):
            return _Name(_STORAGES.get(name, name))
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _Name("bytes")
        known = _CALLS.get((module, name))
        if known is None:
            raise Unsafe(f"{self._where} asks for {f'{module}.{name}'[:200]!r}, which is not on the allow-list")
        return known

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        _must(kind == "storage" and isinstance(dtype, _Name) and isinstance(key, str) and key.isascii())
        _must(key.isdigit() and len(key) < 12 and _size(numel))
        return _Storage(dtype.text, key, numel)

    def _reduce(self) -> None:
        args = self.stack.pop()
        call = self.stack.pop()
        _must(isinstance(args, tuple) and isinstance(call, str))
        self.stack.append(getattr(self, call)(*args))

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any,
        dtype: Any = None, flags: Any = None,
    ) -> Stored:  # fmt: skip
        """What ``_rebuild_tensor_v2`` and ``_v3`` are given; no ``flags`` (conj, neg): staged data have none."""
        _must(isinstance(storage, _Storage) and _size(offset) and _sizes(shape) and _sizes(stride) and not flags)
        _must(len(shape) == len(stride) and not hooks and math.prod(shape) <= MAX_BYTES)
        self._spend(len(shape))
        kind, numel = storage.dtype, storage.numel
        if isinstance(dtype, _Name):
            kind, numel = dtype.text, storage.numel // DTYPE_BYTES[dtype.text]
        _must(kind in DTYPE_BYTES)
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        _must(0 in shape or last < numel)
        return Stored(kind, storage.key, numel, offset, shape, stride)

    def _ordered(self, pairs: Any = ()) -> dict[Any, Any]:
        _must(isinstance(pairs, (list, tuple, dict)))
        self._spend(len(pairs))
        if isinstance(pairs, dict):
            return dict(pairs)
        _check_keys([k for k, _ in pairs])
        return dict(pairs)

    def _set(self, items: Any = ()) -> set[Any]:
        _must(isinstance(items, (list, tuple)))
        self._spend(len(items))
        _check_keys(list(items))
        return set(items)

    def _torch_size(self, dims: Any = ()) -> tuple[int, ...]:
        _must(_sizes(dims))
        self._spend(len(dims))
        return tuple(dims)

    def _encode(self, text: Any, codec: Any) -> bytes:
        _must(isinstance(text, str) and codec == "latin1")
        self._spend(len(text))
        return bytes(text, "latin1")

    def _complex(self, real: Any, imag: Any) -> complex:
        _must(type(real) is float and type(imag) is float)
        return complex(real, imag)

    def _bytes(self) -> bytes:
        return b""

    def _set_items(self) -> None:
        items = self.pop_mark()
        self._into(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._into([key, value])

    def _into(self, items: list[Any]) -> None:
        _check_keys(items[::2])
        _must(isinstance(self.stack[-1], dict))
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _build(self) -> None:
        """An OrderedDict's attributes, such as a state dict's ``_metadata``: nothing reads them."""
        _must(isinstance(self.stack.pop(), dict))

    def _unknown(self) -> None:
        raise ValueError("an instruction that torch.save never writes")

    dispatch = dict.fromkeys(range(256), _unknown) | {
        getattr(pickle, op)[0]: _Machine.dispatch[getattr(pickle, op)[0]] for op in _OPCODES.split()
    }
    dispatch |= {pickle.SETITEMS[0]: _set_items, pickle.SETITEM[0]: _set_item, pickle.REDUCE[0]: _reduce,
                 pickle.BUILD[0]: _build, pickle.GLOBAL[0]: _Machine.dispatch[pickle.GLOBAL[0]]}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    numel: int


_CALLS = {
    ("torch._utils", "_rebuild_tensor_v2"): "_tensor", ("torch._utils", "_rebuild_tensor_v3"): "_tensor",
    ("collections", "OrderedDict"): "_ordered", ("collections", "Counter"): "_ordered",
    ("torch", "Size"): "_torch_size",
    ("__builtin__", "set"): "_set", ("builtins", "set"): "_set", ("_codecs", "encode"): "_encode",
    ("__builtin__", "complex"): "_complex", ("builtins", "complex"): "_complex", ("__builtin__", "bytes"): "_bytes",
}  # fmt: skip


def _check_keys(keys: list[Any]) -> None:
    for key in keys:
        flat = isinstance(key, _FLAT) or (isinstance(key, tuple) and all(isinstance(part, _FLAT) for part in key))
        if not flat:
            raise TypeError(f"a {type(key).__name__} as a key")


def _must(ok: bool) -> None:
    if not ok:
        raise ValueError("not as torch.save writes it")


def _size(n: Any) -> bool:
    return type(n) is int and 0 <= n <= MAX_BYTES


def _sizes(dims: Any) -> bool:
    return isinstance(dims, (tuple, list)) and len(dims) <= 64 and all(map(_size, dims))

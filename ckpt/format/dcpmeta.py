"""DCP's ``.metadata`` is a pickle; this reads it without trusting it. Pure: torch is not needed.

Only the names that DCP itself writes are resolved, to torch's own classes when ``torch_classes`` gives them, else
to inert stand-ins. Any other name raises ``Unsafe`` before anything of it runs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from ckpt.errors import Damaged, Unsafe
from ckpt.format.manifest import DTYPE_BYTES

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
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __hash__(self) -> int:
        return hash((type(self).__name__, getattr(self, "fqn", None), str(getattr(self, "offset", self.args))))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)


def read(data: bytes, where: str, torch_classes: Callable[[str, str], Any] | None = None) -> Any:
    """Decode ``.metadata``; ``torch_classes(module, name)`` resolves allowed names to the real classes.

    Raises ``Unsafe`` for a name outside the allow-list, ``Damaged`` for bytes that are no such pickle.
    """
    try:
        return _Unpickler(io.BytesIO(data), where, torch_classes).load()
    except Unsafe:
        raise
    except Exception as e:
        raise Damaged(f"{where} cannot be decoded: {type(e).__name__}: {str(e)[:120]}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, f: io.BytesIO, where: str, resolve: Callable[[str, str], Any] | None) -> None:
        super().__init__(f)
        self._where, self._resolve = where, resolve

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name in DTYPE_BYTES  # torch.load and friends are names of torch too
        if (module, name) not in ALLOWED and not is_dtype:
            raise Unsafe(f"{self._where} asks for {module}.{name}, which is not on the allow-list")
        if self._resolve is not None:
            return self._resolve(module, name)
        return name if is_dtype else type(name, (StandIn,), {})

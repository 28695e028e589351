"""Where bytes live: one contract, one file a backend. Importing this imports no storage client.

``open_store`` chooses the backend by URL: a path or ``file://`` is a disk, ``memory://name`` this process,
``s3://``, ``gs://``, ``az://`` and ``abfs://`` go through obstore, everything else through fsspec.
"""

from __future__ import annotations

import os
import re
import uuid
import weakref
from typing import Any

from ckpt.errors import NoContainer, Refused, StorageError

from .contract import Buffer, Entry, Store

__all__ = ["Buffer", "Entry", "Store", "conditional_put_works", "open_store", "refuse_object"]

_BUCKETS = {"s3", "s3a", "gs", "gcs"}
_OBSTORE = _BUCKETS | {"az", "azure", "abfs", "abfss"}
_known: weakref.WeakKeyDictionary[Store, bool] = weakref.WeakKeyDictionary()


def open_store(url: str | os.PathLike[str], *, client: str | None = None, **storage_options: Any) -> Store:
    """The store at a URL; sends nothing yet.

    ``storage_options`` are fsspec's (``endpoint_url``, ``key``, ``secret``, ``token``, ``profile``, ``anon``,
    ``region``, ``client_kwargs``...), which both clients understand, or a client's own; ``retry_budget_s``
    bounds how long one call keeps trying (default 120). ``client`` forces "obstore" or "fsspec", and is
    ``Refused`` where that cannot be.
    """
    url = checked_url(os.fspath(url))
    scheme = url.partition("://")[0] if "://" in url else "file"
    if client not in (None, "obstore", "fsspec"):
        raise Refused(f"no such storage client: {client!r}", hint='"obstore", "fsspec" or None')
    if client == "obstore" and scheme not in _OBSTORE:
        raise Refused(f"obstore does not serve {scheme}:// here", hint=f"it serves {', '.join(sorted(_OBSTORE))}")
    if scheme in _BUCKETS and "@" in url.split("/")[2]:
        raise Refused(f"the URL of a {scheme}:// bucket takes no credentials", hint="pass them as storage options")
    if client != "fsspec":
        if scheme == "file":
            from .local import LocalStore

            return LocalStore(url, **storage_options)
        if scheme == "memory":
            from .memory import MemoryStore

            return MemoryStore(url, **storage_options)
        if scheme in _OBSTORE:
            from .objects import ObjectStore

            return ObjectStore(url, **storage_options)
    from .filesystems import open_filesystem

    return open_filesystem(url, **storage_options)


def checked_url(url: str) -> str:
    """The URL, with ``~`` made a folder. Raises ``Refused`` for what only looks like one: it would name a local folder.

    ``str(Path("s3://bucket") / "run")`` is ``s3:/bucket/run``: a run that starts from zero on another machine.
    """
    scheme, sep, rest = url.partition("://")
    if not url.strip() or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(?!//|:)|[A-Za-z][A-Za-z0-9+.-]+//", url):
        raise Refused(f"{url!r} is no URL and no path", hint="a path, or a scheme with two slashes: s3://bucket/run")
    if sep and scheme != "file" and "//" in rest:
        raise Refused(f"{url}: an empty name between slashes means one place to one client and another to the next",
                      hint=f"{scheme}://{re.sub('/+', '/', rest)}")  # fmt: skip
    if sep and scheme == "file" and not rest.startswith("/"):
        raise Refused(f"{url}: after file:// comes an absolute path", hint=f"file:///{rest}")
    return os.path.expanduser(url) if not sep else url


def refuse_object(url: str, *, client: str | None = None, **storage_options: Any) -> None:
    """Raise ``NoContainer`` where a remote URL names an object rather than a folder; for URLs that list as empty.

    Below an object there is nothing, so that a run at ``s3://bucket/model.bin`` would look like one never started.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    if "://" not in parent.rstrip("/") + "/" or parent.endswith("/") or url.startswith("memory:"):
        return  # a disk tells files from folders by itself, and a bucket is no object
    try:
        found = open_store(parent, client=client, **storage_options).list(name)
    except StorageError:
        return  # a policy may allow the run's own prefix only; then nothing can be said
    if any(e.key == name for e in found):
        raise NoContainer(
            f"{url} is an object, not a folder in which a run could be",
            hint="give the URL of a folder; it need not exist yet",
        )


def conditional_put_works(store: Store) -> bool:
    """Whether of two rivals that create one key exactly one wins; tried once a store object, then remembered.

    Some services ignore the condition silently, so it is tried: the same key is created twice. A store that
    can only look before it writes says so itself, as a trial without a rival would not show it.
    """
    if store not in _known:
        key = f"epochs/.probe-{uuid.uuid4().hex}"
        first = store.put_if_absent(key, b"first")
        try:
            second = store.put_if_absent(key, b"second")
        finally:
            store.delete([key])
        _known[store] = first and not second and getattr(store, "conditional_put", None) is not False
    return _known[store]

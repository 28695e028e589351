"""What a URL points at: a run, one of its steps, a checkpoint folder that stands alone, or plain DCP. No torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckpt.catalog import Catalog, Listing
from ckpt.errors import NotFound, Refused
from ckpt.foreign.safetensors import SUFFIX
from ckpt.format import layout
from ckpt.format.layout import Attempt
from ckpt.store import open_store, refuse_object
from ckpt.store.contract import Store
from ckpt.tools.foreign import find_safetensors

Kind = Literal["run", "folder", "plain DCP", "safetensors"]

_STEP = re.compile(r"(.*[^/])@(\d{1,12})")
_FOLDER = re.compile(r"(?:(.*)/)?(steps/\d{12}/e[0-9a-f.]+-\d+)/*")
_SECRET = re.compile(r"secret|password|token|key|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What the user typed: a URL, perhaps a step, and how to reach the store."""

    url: str
    step: int | None = None
    client: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, client: str | None = None, options: Mapping[str, Any] | None = None) -> Address:
        """Split ``URL[@STEP]``: only "@" and digits at the very end are a step, and never those of ``user:pw@host``."""
        m = _STEP.fullmatch(text)
        if m and not re.fullmatch(r"[^/]+://[^/]*:[^/]*", m[1]):
            return cls(url=m[1], step=int(m[2]), client=client, options=options or {})
        return cls(url=text, client=client, options=options or {})

    def of_run(self, place: Place) -> Address:
        """The address of the run in which a place lies."""
        return replace(self, url=place.store.url, step=None) if place.attempt is not None else self

    def paste(self, command: str, step: int | None = None, flags: str = "") -> str:
        """A line that a shell takes; secrets among the storage options are left out."""
        words = ["ckpt", command, self.url if step is None else f"{self.url}@{step}", *flags.split()]
        if self.client:
            words += ["--client", self.client]
        for name, value in self.options.items():
            words += [] if _SECRET.search(name) else ["-o", f"{name}={value}"]
        return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What was found there. ``prefix`` is the checkpoint folder's (in a run: of the attempt that the URL names).

    ``name`` is the file to open, of safetensors.
    """

    kind: Kind
    store: Store
    prefix: str = ""
    attempt: Attempt | None = None
    listing: Listing | None = None
    name: str = ""

    @property
    def catalog(self) -> Catalog:
        """The records of the run."""
        return Catalog(self.store)

    @property
    def where(self) -> str:
        """The place's full name."""
        return f"{self.store.url.rstrip('/')}/{self.prefix}".rstrip("/")


def locate(address: Address) -> Place:
    """Look what lies at an address. Reads names only.

    Raises ``NotFound`` where nothing of a checkpoint is there, ``StorageError`` where that cannot be known.
    """
    place = _locate(address)
    if address.step is not None and (place.kind != "run" or place.attempt is not None):
        raise Refused(f"{place.where} is one checkpoint already, so @{address.step} selects nothing",
                      hint=f"leave @{address.step} out")  # fmt: skip
    return place


def _locate(address: Address) -> Place:
    folder = _FOLDER.fullmatch(address.url)
    if folder and (attempt := layout.parse_step_key(folder[2] + "/")):
        store = open_store(folder[1] or ".", client=address.client, **address.options)
        listing = Catalog(store).listing()
        if listing.commits or listing.epochs:
            return Place(kind="run", store=store, prefix=attempt.prefix, attempt=attempt, listing=listing)
        return _alone(store, attempt.prefix)
    if address.url.endswith(SUFFIX) and (one := _one_file(address)) is not None:
        return one
    store = open_store(address.url, client=address.client, **address.options)
    listing = Catalog(store).listing()
    if listing.commits or listing.epochs or store.list(layout.STEPS):
        return Place(kind="run", store=store, listing=listing)
    refuse_object(address.url, client=address.client, **address.options)
    return _alone(store, "")


def _one_file(address: Address) -> Place | None:
    """The safetensors file that a URL names; None where it is a folder, or nothing."""
    folder, _, name = address.url.rpartition("/")
    store = open_store(folder or ".", client=address.client, **address.options)
    if any(e.key == name for e in store.list(name)):
        return Place(kind="safetensors", store=store, name=name)
    return None


def _alone(store: Store, prefix: str) -> Place:
    kinds: dict[str, Kind] = {layout.MANIFEST: "folder", layout.METADATA: "plain DCP"}
    for name, kind in kinds.items():
        if any(e.key == prefix + name for e in store.list(prefix + name)):
            return Place(kind=kind, store=store, prefix=prefix)
    if (file := find_safetensors(store, prefix)) is not None:
        return Place(kind="safetensors", store=store, prefix=prefix, name=file)
    raise NotFound(
        f"there is no run and no checkpoint at {store.url.rstrip('/')}/{prefix}".rstrip("/"),
        facts=[("looked for", "epochs/, commits/, steps/, manifest.json, .metadata: none is there")],
        hint="check the URL: a mistyped place looks the same as a run that has never been started",
    )


def select(place: Place, step: int | None) -> Attempt:
    """The attempt of a run that is meant: the one of the URL, or the newest usable one (of ``step``).

    An asked-for step may also be one that is not usable, so that it can be looked at. Raises ``NotFound``.
    """
    if place.attempt is not None:
        return place.attempt
    assert place.listing is not None
    catalog = place.catalog
    if step is None:
        return catalog.resolve(None)
    for choice in (catalog.usable(place.listing), catalog.counted(place.listing), sorted(place.listing.commits)[::-1]):
        for attempt in choice:
            if attempt.step == step:
                return attempt
    return catalog.resolve(step)

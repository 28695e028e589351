"""Names on the store: the only place where a key is built or taken apart. Pure.

::

    epochs/00000007.json                  claim of epoch 7            epochs/00000007.base.json   what it builds on
    steps/000000042000/e00000007-0/...    one attempt, written once   commits/000000042000-e00000007-0.json
    quarantine/<attempt>.json             why it is not to be used    retire/<attempt>.json       about to be deleted
    ledger/e00000007-...jsonl             what happened       scrub/<attempt>/...json     what validations found good

Where the store has no conditional put, an epoch also carries a random id (``e00000007.1a2b3c4d``), which is part
of every name and comparison, so that two starts that took the same number stay two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EPOCHS, STEPS, COMMITS = "epochs/", "steps/", "commits/"
QUARANTINE, RETIRE, LEDGER, SCRUB = "quarantine/", "retire/", "ledger/", "scrub/"
MANIFEST, METADATA = "manifest.json", ".metadata"

_EPOCH = r"(\d{8})(?:\.([0-9a-f]{8}))?"
_COUNTER = r"(0|[1-9]\d{0,8})"  # one spelling only, so that two names never mean one attempt
_EPOCH_KEY = re.compile(rf"epochs/{_EPOCH}(\.base)?\.json", re.ASCII)
_ATTEMPT = re.compile(rf"(\d{{12}})-e{_EPOCH}-{_COUNTER}", re.ASCII)
_FOLDER = re.compile(rf"steps/(\d{{12}})/e{_EPOCH}-{_COUNTER}/", re.ASCII)
_REFERENCE = re.compile(rf"\.\./\.\./(\d{{12}})/e{_EPOCH}-{_COUNTER}/(.+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The fencing token of one start of a run; a later start compares greater."""

    number: int
    nonce: str = ""

    def __str__(self) -> str:
        return f"e{self._digits}"

    @property
    def _digits(self) -> str:
        return f"{self.number:08d}" + (f".{self.nonce}" if self.nonce else "")

    @property
    def claim_key(self) -> str:
        """Key of the claim record."""
        return f"{EPOCHS}{self._digits}.json"

    @property
    def base_key(self) -> str:
        """Key of the base record."""
        return f"{EPOCHS}{self._digits}.base.json"


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One try to save one step in one epoch; the unit that is committed, chosen, quarantined, retired."""

    step: int
    epoch: Epoch
    counter: int = 0

    def __str__(self) -> str:
        return f"{self.step:012d}-{self.epoch}-{self.counter}"

    @property
    def prefix(self) -> str:
        """Folder of the attempt's objects, with the final "/"."""
        return f"{STEPS}{self.step:012d}/{self.epoch}-{self.counter}/"

    @property
    def commit_key(self) -> str:
        """Key of the commit record."""
        return f"{COMMITS}{self}.json"

    @property
    def quarantine_key(self) -> str:
        """Key of the quarantine record."""
        return f"{QUARANTINE}{self}.json"

    @property
    def retire_key(self) -> str:
        """Key of the retire record."""
        return f"{RETIRE}{self}.json"

    @property
    def scrub_prefix(self) -> str:
        """Where validations remember what they found good, with the final "/"."""
        return f"{SCRUB}{self}/"


def parse_epoch_key(key: str) -> tuple[Epoch, bool] | None:
    """``(epoch, is_base)`` of a key below ``epochs/``, or None for a foreign name."""
    m = _EPOCH_KEY.fullmatch(key)
    return (Epoch(int(m[1]), m[2] or ""), m[3] is not None) if m else None


def parse_attempt(name: str) -> Attempt | None:
    """The attempt of a name as ``str(attempt)`` wrote it, or None."""
    m = _ATTEMPT.fullmatch(name)
    return Attempt(int(m[1]), Epoch(int(m[2]), m[3] or ""), int(m[4])) if m else None


def parse_record_key(key: str, folder: str) -> Attempt | None:
    """The attempt that a key such as ``commits/<attempt>.json`` names, or None."""
    if not (key.startswith(folder) and key.endswith(".json")):
        return None
    return parse_attempt(key[len(folder) : -len(".json")])


def parse_step_key(key: str) -> Attempt | None:
    """The attempt whose folder an object lies in, or None."""
    m = _FOLDER.match(key)
    return Attempt(int(m[1]), Epoch(int(m[2]), m[3] or ""), int(m[4])) if m else None


def data_name(rank: int, n: int) -> str:
    """Name of a rank's n-th data object, in DCP's own style."""
    return f"__{rank}_{n}.distcp"


def index_name(rank: int) -> str:
    """Name of a rank's index."""
    return f"index/{rank:05d}.json"


def data_rank(name: str) -> int | None:
    """The rank that wrote a data object, of this folder or referred to; None for another kind of name."""
    m = re.fullmatch(r"__(\d{1,9})_\d{1,9}\.distcp", split_name(name)[1], re.ASCII)
    return int(m[1]) if m else None


def index_rank(name: str) -> int | None:
    """The rank whose index an object is, in this folder or referred to; None for another kind of name."""
    own = split_name(name)[1]
    m = re.fullmatch(r"index/(\d{5,9})\.json", own, re.ASCII)
    return int(m[1]) if m and index_name(int(m[1])) == own else None


def reference_name(holder: Attempt | None, name: str) -> str:
    """How another attempt's folder names an object of ``holder``: the path from there (None: from its own folder)."""
    return name if holder is None else f"../../{holder.prefix.removeprefix(STEPS)}{name}"


def split_name(name: str) -> tuple[Attempt | None, str]:
    """The attempt that holds the object of a name in a manifest (None: the manifest's own), and its name there."""
    m = _REFERENCE.fullmatch(name)
    return (Attempt(int(m[1]), Epoch(int(m[2]), m[3] or ""), int(m[4])), m[5]) if m else (None, name)


def object_key(prefix: str, name: str) -> str:
    """Key of an object that the manifest of the folder ``prefix`` names."""
    holder, own = split_name(name)
    return (prefix if holder is None else holder.prefix) + own

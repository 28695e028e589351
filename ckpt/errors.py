"""Every error that torchrelay raises on purpose.

::

    CkptError
    ├── Refused            C-U  2   asked for something that would lose or mix state
    ├── Unsupported        C-V  5   a format version or required feature this reader does not know
    ├── NotFound           C-N  4   no such run, step or object; nothing valid to load
    ├── Mismatch           C-M  1   the state in memory and the step differ in keys, shape or dtype
    ├── NotProven          C-F  1   what is in memory after a load is not what was saved, though the bytes are good
    ├── Damaged            C-D  1   stored bytes are not the bytes that were saved
    │   ├── Incomplete     C-P  1   an object of a committed step is missing or has another size
    │   └── Unsafe         C-X  1   a file asks for code outside the allow-list
    ├── Superseded         C-S  6   a newer start of the same run has taken over
    ├── RankFailed         C-R  1   another rank failed, or did not answer before the deadline
    └── StorageError       C-E  5   the store did not do what it was asked; says nothing about the data
        ├── AccessDenied   C-A  5   credentials refused or not allowed
        ├── NoContainer    C-B  5   no such bucket, or the place is not a folder
        ├── ObjectMissing  C-O  5   one key is not there (callers who expect it turn it into Incomplete)
        └── Unreachable    C-T  5   no answer from the endpoint, or time-outs until the budget ran out

The third column is the exit status of a command that ends with the error (see README, "Exit status").
Only ``Damaged`` and its children are proof of damage: nothing else may lead to falling back to an older step.
"""

from __future__ import annotations

from typing import ClassVar


class CkptError(Exception):
    """Base of all errors; carries facts as aligned lines and the next command to paste.

    ``facts`` are (label, value) pairs shown one a line; ``hint`` is what to do next, preferably a command.
    """

    code: ClassVar[str] = "C-0"
    exit_status: ClassVar[int] = 70

    def __init__(self, message: str, *, facts: list[tuple[str, str]] | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.facts = list(facts or [])
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:  # errors travel between ranks
        return (_rebuild, (type(self), self.message, self.facts, self.hint))

    def __str__(self) -> str:
        rows = [*self.facts, *([("next", self.hint)] if self.hint else [])]
        width = max((len(label) for label, _ in rows), default=0)
        return "\n".join([f"[{self.code}] {self.message}", *(f"  {label:<{width}}  {value}" for label, value in rows)])


def _rebuild(cls: type[CkptError], message: str, facts: list[tuple[str, str]], hint: str | None) -> CkptError:
    return cls(message, facts=facts, hint=hint)


class Refused(CkptError):
    """The request would lose or mix state, or is a usage mistake; nothing was done."""

    code, exit_status = "C-U", 2


class Unsupported(CkptError):
    """The step needs a format version or feature that this reader does not know."""

    code, exit_status = "C-V", 5


class NotFound(CkptError):
    """There is no such run, step or object, or no valid step at all."""

    code, exit_status = "C-N", 4


class Mismatch(CkptError):
    """The live state and the saved one differ in keys, shapes, dtypes or per-rank meaning."""

    code, exit_status = "C-M", 1


class NotProven(CkptError):
    """The restored tensors have other fingerprints than the saved ones; nothing may train on them."""

    code, exit_status = "C-F", 1


class Damaged(CkptError):
    """Stored bytes differ from what was saved: proven, so falling back is allowed."""

    code, exit_status = "C-D", 1


class Incomplete(Damaged):
    """An object that a committed step names is missing or has another size."""

    code, exit_status = "C-P", 1


class Unsafe(Damaged):
    """A file would run code or build a type outside the allow-list; it was not loaded."""

    code, exit_status = "C-X", 1


class Superseded(CkptError):
    """A newer epoch of the run exists: this writer must stop."""

    code, exit_status = "C-S", 6


class RankFailed(CkptError):
    """A rank raised, or was silent past the deadline; the ranks are named."""

    code, exit_status = "C-R", 1


class StorageError(CkptError):
    """The store failed; this says nothing about the data in it, so nothing falls back on it."""

    code, exit_status = "C-E", 5


class AccessDenied(StorageError):
    """Credentials are missing, wrong or not allowed to do this."""

    code, exit_status = "C-A", 5


class NoContainer(StorageError):
    """The bucket does not exist, or the path is not a folder."""

    code, exit_status = "C-B", 5


class ObjectMissing(StorageError):
    """One key is not there."""

    code, exit_status = "C-O", 5


class Unreachable(StorageError):
    """No answer from the endpoint before the time budget ran out."""

    code, exit_status = "C-T", 5

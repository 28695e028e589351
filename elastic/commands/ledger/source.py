"""Where the commands that read a ledger get it from: the run's URL, and how to reach its storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ckpt.errors import NotFound, Refused
from elastic.ledger.ends import printable
from elastic.ledger.reader import Ledger, Reader

_REACH = [
    click.option(
        "-o", "--option", "options", multiple=True, metavar="NAME=VALUE", help="A storage option, as fsspec's."
    ),
    click.option("--client", type=click.Choice(["obstore", "fsspec"]), help="Force a storage client."),
]


def reachable(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options by which storage is reached."""
    for option in reversed(_REACH):
        command = option(command)
    return command


def reader(url: str, o: dict[str, Any]) -> Reader:
    """A reader of the ledger of the run at ``url``; nothing is read yet."""
    from ckpt.store import open_store

    return Reader(open_store(url, client=o["client"], **storage_options(o["options"])))


def events_of(url: str, found: Ledger) -> tuple[Ledger, list[str]]:
    """The ledger, and a note on lines that could not be read. Raises ``NotFound`` where it holds no event."""
    bad = f"{len(found.problems)} unreadable line{'s' if len(found.problems) != 1 else ''} left out"
    if not found.events:
        why = f"holds no event; {bad}" if found.problems else "does not exist: nothing there was written by elastic.Run"
        raise NotFound(f"the ledger at {url} {why}", hint=f"ckpt ls {url}")
    return found, [f"{bad}, the first: {printable(found.problems[0])}"] if found.problems else []


def write_whole(path: Path, content: str) -> None:
    """Write a file that others may be reading: it is the old one or the new one at any moment."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(content, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror}") from None


def storage_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """The pairs NAME=VALUE of ``-o``; values that look like JSON are read as such."""
    out: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise Refused(f"-o {pair}: a storage option is NAME=VALUE", hint="-o endpoint_url=http://localhost:9000")
        try:
            plain = text[:1] not in ("{", "[") and text not in ("true", "false") and not name.endswith("_s")
            out[name] = text if plain else json.loads(text)
        except ValueError:
            raise Refused(f"-o {name}: the value cannot be read") from None
    return out

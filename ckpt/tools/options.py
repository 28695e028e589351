"""Options that all commands share, and what they are turned into."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ckpt.tools.target import Address

F = TypeVar("F", bound=Callable[..., Any])

STATUSES = """\b
Exit status:
  0 good                        1 damage
  2 usage                       3 not verified
  4 nothing (valid) there       5 storage, credentials or format version
  6 busy or superseded         70 bug
"""
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """Seconds of a text such as ``90s``, ``10m``, ``6h`` or ``7d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds; a bare number is refused: 6 of what?"""
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)", str(value))
        if match is None:
            self.fail(f"{value!r} is not a duration: write it like 90s, 10m, 6h or 7d", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


def shown_duration(seconds: float) -> str:
    """The shortest text that ``Duration`` reads back."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:g}{unit}"
    return f"{seconds:g}s"


@dataclass
class Settings:
    """What holds for the whole call; ``cli`` reads it when an error has ended the command."""

    json: bool = False
    debug: bool = False


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def store(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            setattr(context.find_root().ensure_object(Settings), name, True)

    return store


def _option(context: click.Context, _: click.Parameter, pairs: tuple[str, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"{pair!r} is not NAME=VALUE")
        out[name] = _value(name, text)
    return out


def _value(name: str, text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        if text[:1] in ("{", "["):
            return json.loads(text)
        return float(text) if name.endswith("_s") else text
    except ValueError:
        raise click.BadParameter(f"the value of {name!r} cannot be read") from None


def common(command: F) -> F:
    """Add ``URL``, the storage options, ``--json`` and ``--debug``."""
    for decorate in (
        click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=_set("debug"),
                     help="Show the traceback when the tool itself fails."),
        click.option("--json", is_flag=True, expose_value=False, is_eager=True, callback=_set("json"),
                     help="Print one JSON document with a schema instead of text; sizes are exact bytes."),
        click.option("-o", "--option", "options", multiple=True, metavar="NAME=VALUE", callback=_option,
                     help="A storage option as fsspec names it (endpoint_url=…, profile=…, anon=true); repeatable. "
                          "The AWS_… variables work without it."),
        click.option("--client", type=click.Choice(["obstore", "fsspec"]), help="Force a storage client."),
    ):  # fmt: skip
        command = decorate(command)
    return command


def address(context: click.Context, text: str, client: str | None, options: dict[str, Any]) -> Address:
    """What the URL argument means."""
    return Address.parse(text, client=client, options=options)

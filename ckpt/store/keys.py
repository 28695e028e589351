"""Which keys a store takes. Pure.

The rules are those of the strictest backend, so that what works on a disk works in a bucket and back.
"""

from __future__ import annotations

from ckpt.errors import Refused

# A file that is being written has such a name until it is whole: never a key, not listed while it has a writer.
TEMP_PREFIX = ".torchrelay-tmp-"


def checked_key(url: str, key: str, *, leftover: bool = False) -> str:
    """The key itself; ``Refused`` if it is empty, absolute, climbs out, or would mean another key elsewhere.

    ``leftover`` allows the name of a file that was never finished: to delete it.
    """
    plain = key.replace(f"/{TEMP_PREFIX}", "/") if leftover else key
    if not all(_is_name(part) for part in plain.split("/")):
        raise Refused(
            f"not a key below {url}: {key!r}",
            hint='keys are relative and "/"-separated, without empty, "." or ".." parts and control characters',
        )
    return key


def checked_prefix(url: str, prefix: str) -> str:
    """The folder that a prefix reaches into, without a final "/"; what follows is the beginning of a name."""
    folder, slash, _ = prefix.rpartition("/")
    return checked_key(url, folder) if slash else ""


def _is_name(part: str) -> bool:
    # Some clients turn a backslash into "/", some servers refuse control characters.
    plain = part.isprintable() and "\\" not in part
    return plain and part not in ("", ".", "..") and not part.startswith(TEMP_PREFIX)


def join(root: str, key: str) -> str:
    """``root/key``, where either may be empty."""
    return f"{root}/{key}" if root and key else root or key

"""Scenarios as TOML, and back: every word is checked, and a wrong one is answered with those there are."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from drills.errors import Usage
from drills.faults import Fault
from drills.faults.clock import ClockJump
from drills.faults.disk import FullDisk
from drills.faults.memory import FlipRestoredBit
from drills.faults.process import Freeze, Kill, KillAgent, KillJob, Stale, Terminate
from drills.faults.rest import Damage
from drills.faults.slow import MemorySqueeze, Throttle
from drills.faults.storage import StorageFault
from drills.scenario import Scenario, Strike, Targets
from drills.schedule import When

FAULTS: dict[str, type[Any]] = {
    cls().name: cls
    for cls in (
        Kill, KillJob, KillAgent, Terminate, Freeze, Stale, Throttle, MemorySqueeze, ClockJump, FullDisk, StorageFault,
        Damage, FlipRestoredBit,
    )
}  # fmt: skip
_FIXED = ("timeout_s", "then", "needs", "name")

EXAMPLE = """name = "kill-in-commit-twice"
summary = "Rank 0 dies as it commits, and again once the job is back."
proves = "A commit that was cut off is never half there."
reaction = "restart"

[targets]
first_step_s = 60.0

[[strike]]
fault = "kill"
when = { phase = "commit" }

[[strike]]
fault = "kill"
when = { after = "back" }
"""


def read(path: Path) -> Scenario:
    """The scenario in a file. Raises ``Usage`` that names the place and the words that would be right."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise Usage(f"{path} cannot be read: {e}") from None
    except tomllib.TOMLDecodeError as e:
        raise Usage(f"{path} is not TOML: {e}", hint="drills describe --toml kill-in-commit") from None
    try:
        return from_dict(raw)
    except ValueError as e:
        raise Usage(f"{path}: {e}", hint="drills describe --toml kill-in-commit") from None


def from_dict(raw: dict[str, Any]) -> Scenario:
    """A scenario from its tables. Raises ``ValueError`` with the place in the file."""
    known = {f.name for f in dataclasses.fields(Scenario)} - {"strikes"} | {"strike"}
    _only(raw, known, "")
    for name in ("name", "summary", "proves", "strike"):
        if name not in raw:
            raise ValueError(f"{name} is missing")
    strikes = raw["strike"]
    if not isinstance(strikes, list) or not all(isinstance(s, dict) for s in strikes):
        raise ValueError("strike has to be [[strike]], one table for each fault")
    rest = {k: v for k, v in raw.items() if k not in ("strike", "targets")}
    values = {k: _value(v, get_type_hints(Scenario)[k], k) for k, v in rest.items()}
    targets = _fill(Targets, raw.get("targets", {}), "targets.")
    return Scenario(**values, targets=targets, strikes=tuple(_strike(s, n) for n, s in enumerate(strikes, 1)))


def to_dict(scenario: Scenario) -> dict[str, Any]:
    """The tables of a scenario; ``from_dict`` makes the same of them."""
    raw: dict[str, Any] = {
        f.name: v
        for f in dataclasses.fields(scenario)
        if f.name not in ("strikes", "targets") and (v := getattr(scenario, f.name)) != f.default
    }
    raw["targets"] = dataclasses.asdict(scenario.targets)
    raw["strike"] = [_strike_to_dict(s) for s in scenario.strikes]
    return raw


def dumps(scenario: Scenario) -> str:
    """The scenario as TOML text."""
    raw = to_dict(scenario)
    lines = [f"{k} = {_literal(v)}" for k, v in raw.items() if k not in ("targets", "strike")]
    lines += ["", "[targets]", *(f"{k} = {_literal(v)}" for k, v in raw["targets"].items())]
    for strike in raw["strike"]:
        lines += ["", "[[strike]]", *(f"{k} = {_literal(v)}" for k, v in strike.items())]
    return "\n".join(lines) + "\n"


def _strike(raw: dict[str, Any], number: int) -> Strike:
    where = f"strike {number}: "
    if raw.get("fault") not in FAULTS:
        raise ValueError(f"{where}fault = {raw.get('fault')!r}: one of {', '.join(FAULTS)}")
    cls = FAULTS[raw["fault"]]
    own = {f.name for f in dataclasses.fields(cls)} - set(_FIXED)
    _only(raw, own | {"fault", "when", "for_s", "until_back"}, where)
    fault: Fault = _fill(cls, {k: v for k, v in raw.items() if k in own}, where)
    when = raw.get("when", {})
    if not isinstance(when, dict):
        raise ValueError(f'{where}when has to be a table, such as when = {{ phase = "commit" }}')
    for_s, until_back = raw.get("for_s"), raw.get("until_back", False)
    return Strike(
        fault=fault, when=_fill(When, when, f"{where}when."), until_back=_value(until_back, bool, f"{where}until_back"),
        for_s=None if for_s is None else _value(for_s, float, f"{where}for_s"),
    )  # fmt: skip


def _strike_to_dict(strike: Strike) -> dict[str, Any]:
    raw: dict[str, Any] = {"fault": strike.fault.name}
    for f in dataclasses.fields(strike.fault):  # type: ignore[arg-type]
        if f.name not in _FIXED and (v := getattr(strike.fault, f.name)) != f.default:
            raw[f.name] = v
    when = {f.name: v for f in dataclasses.fields(When) if (v := getattr(strike.when, f.name)) != f.default}
    raw |= {"when": when} if when else {}
    raw |= {} if strike.for_s is None else {"for_s": strike.for_s}
    return raw | ({"until_back": True} if strike.until_back else {})


def _fill(cls: type[Any], raw: dict[str, Any], where: str) -> Any:
    """A frozen value from a table, every word and type checked."""
    hints = get_type_hints(cls)
    _only(raw, {f.name for f in dataclasses.fields(cls)}, where)
    try:
        return cls(**{k: _value(v, hints[k], where + k) for k, v in raw.items()})
    except ValueError as e:
        text = str(e)
        raise ValueError(text if not where or text.startswith(where) else where + text) from None


def _only(raw: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(raw.keys() - known):
        raise ValueError(f"{where}{unknown[0]} is not known here: {', '.join(sorted(known))}")


def _value(value: Any, hint: Any, where: str) -> Any:
    """The value as the type that is meant, a whole number for a decimal one included."""
    options = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if float in options and type(value) is int:
        return float(value)
    if type(value) in options:
        return value
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    wanted = " or ".join(names[o] for o in options if o in names)
    raise ValueError(f"{where} = {value!r}: has to be {wanted}")


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_literal(v)}" for k, v in value.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)

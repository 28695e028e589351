"""Options that ``interval`` and ``plan`` share, and how they become Rates, Costs and Job."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click

from elastic import units
from elastic.economics.inputs import BadInput, Costs, Job, Rates, Tier


class Quantity(click.ParamType[float]):
    """A number with its unit, parsed by one of :mod:`elastic.units`."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse, or fail with the sentence that shows how to write it."""
        if isinstance(value, float):
            return value
        try:
            return self._parse(value)
        except units.BadUnit as error:
            self.fail(str(error), param, ctx)


def bounded(parse: Callable[[str], float], low: float, high: float, accepted: str) -> Callable[[str], float]:
    """The parser, refusing sizes that no job has: the models lose their digits there. Zero and below are judged later,
    by what they stand for."""

    def within(text: str) -> float:
        value = parse(text)
        if value > 0 and not low <= value <= high:
            raise units.BadUnit(f"{text!r} is out of range: {accepted} is accepted")
        return value

    return within


class Between(click.ParamType[float]):
    """A plain number within bounds."""

    def __init__(self, low: float, high: float, *, whole: bool = False) -> None:
        self.name = "integer" if whole else "number"
        self._parse: type[int] | type[float] = int if whole else float
        self._low, self._high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or fail with what is accepted."""
        kind = "a whole number" if self._parse is int else "a number"
        accepted = f"{kind} from {self._low:,.10g} to {self._high:,.10g} is accepted"
        try:
            number = self._parse(value)
        except ValueError:
            self.fail(f"{value!r} is none: {accepted}", param, ctx)
        if not self._low <= number <= self._high:
            self.fail(f"{value} is out of range: {accepted}", param, ctx)
        return number


LONGEST_S = 10_000 * 31_557_600.0
duration = bounded(units.parse_duration, 1e-6, LONGEST_S * (1 + 1e-9), "1 µs (0.001ms) to 10,000 years (3652500d)")
DURATION = Quantity("time", duration)
BYTES = Quantity("bytes", bounded(units.parse_bytes, 1, 1e18, "1 B to 1,000 PB"))
BANDWIDTH = Quantity("bandwidth", bounded(units.parse_bandwidth, 1, 1e18, "1 B/s to 1,000 PB/s"))
RATE = Quantity("rate", bounded(units.parse_rate, 1e-6, 1e9, "0.000001 to 1,000,000,000 per 1,000 node-days"))
SHARE = Quantity("share", units.parse_share)
devices = bounded(units.parse_count, 0, 1e9, "1 to 1,000,000,000")
DEVICES = Quantity("count", devices)
LARGE = Quantity("count", bounded(units.parse_count, 1, 1e21, "1 to 1e21"))
USD = Between(0, 1e6)

FLAGS = {
    "mtbf_s": "--mtbf", "per_1000_node_days": "--rate", "job_mtbf_s": "--job-mtbf", "failures": "--failures",
    "exposure_s": "--exposure", "prior_failures": "--prior-failures", "shape": "--shape",
    "lognormal_sigma": "--lognormal",
    "notice_share": "--notice-share", "silent_mtbf_s": "--silent-mtbf", "stall_s": "--stall", "persist_s": "--persist",
    "slowdown": "--slowdown", "commit": "--commit", "in_flight": "--in-flight", "detect_s": "--detect",
    "reschedule_s": "--reschedule", "load_s": "--load", "warmup_s": "--warmup", "notice_save_s": "--notice-save",
    "notice_s": "--notice", "tiers": "--tier", "survives": "--tier", "verify_s": "--verify",
    "per_save_usd": "--per-save-usd",
    "nodes": "--nodes", "devices_per_node": "--per-node", "step_s": "--step",
    "align_steps": "--align",
    "work_s": "--work", "current_s": "--current", "usd_per_device_hour": "--price", "min_interval_s": "--min",
    "max_interval_s": "--max", "keep": "--keep", "detection_latency_s": "--late-detection",
    "target_goodput": "--target-goodput",
    "measured": "--measured", "stall_exponent": "--stall-exponent", "persist_exponent": "--persist-exponent",
    "parameters": "--params", "tokens": "--tokens", "peak_flops": "--peak", "mfu": "--mfu", "deadline_s": "--deadline",
    "checkpoint": "--checkpoint", "manual_share": "--manual-share", "marginal": "--marginal",
}  # fmt: skip
"""Input of the calculator -> flag, for error sentences."""


def refuse(error: BadInput) -> NoReturn:
    """End with status 2 and the sentence, the inputs called by their flags."""
    words = {
        "nodes", "failures", "shape", "slowdown", "commit", "keep", "measured", "tiers", "survives", "parameters",
        "tokens", "mfu", "checkpoint", "marginal",
    }  # fmt: skip  # also plain English
    names = "|".join(
        sorted((re.escape(name) for name in FLAGS if name not in words or name == error.field), key=len, reverse=True)
    )
    sentence = str(error).replace("failures and exposure_s", "--failures and --exposure")
    sentence = sentence.replace("tiers with ", "--tier with ")
    sentence = sentence.replace("the number of nodes", "--gpus or --nodes")
    raise click.UsageError(re.sub(rf"(?<![\w-])({names})(?!\w)", lambda m: FLAGS[m[0]], sentence))


def write(files: Mapping[Path, str]) -> None:
    """Write pictures; a place that takes none is a question asked wrongly."""
    for path, content in files.items():
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise click.UsageError(f"{path} cannot be written: {error.strerror}") from None
        click.echo(f"wrote {path}", err=True)


_FROM = [
    click.option(
        "--from", "url", metavar="URL", help="Read what no flag gives off the ledger of a run: failures, costs, step."
    ),
    click.option("-o", "--option", "options", multiple=True, metavar="NAME=VALUE", help="A storage option for --from."),
    click.option("--client", type=click.Choice(["obstore", "fsspec"]), help="Force a storage client for --from."),
]
_RATE = [
    click.option("--mtbf", type=DURATION, help="Mean up-time of the whole job between unplanned stops, like 3.1h."),
    click.option(
        "--rate",
        type=RATE,
        help="Failures per node instead, like 3.79/1000nd (1,000 node-days); needs --gpus or --nodes.",
    ),
    click.option(
        "--failures",
        type=Between(0, 1_000_000, whole=True),
        help="Failures seen so far, with --exposure; beside a rate, which then is the prior.",
    ),
    click.option("--exposure", type=DURATION, help="Up-time, not wall time, in which they were seen, like 24h."),
    click.option(
        "--prior-failures", type=Between(0.01, 10_000), help="How many failures the given or assumed rate is worth."
    ),
    click.option(
        "--job-mtbf", type=DURATION, help="A further cause that does not grow with the nodes, as its own MTBF."
    ),
    click.option(
        "--notice-share",
        metavar="SHARE|SAVED/MISSED",
        help="Stops announced in time to save: a share, or counts like 9/3.",
    ),
    click.option(
        "--shape",
        type=Between(0.2, 10),
        help="Weibull shape of up-times (below 1: failures cluster); default exponential.",
    ),
    click.option("--lognormal", type=Between(0.05, 3), help="Lognormal sigma of up-times instead."),
    click.option("--silent-mtbf", type=DURATION, help="Mean time between silent corruptions; needs --verify."),
]
_COST = [
    click.option(
        "--stall",
        "--save",
        "stall",
        type=DURATION,
        help="--save when saving blocks training: its whole time; else --stall (training stands still) and --persist.",
    ),
    click.option(
        "--persist",
        type=DURATION,
        help="Upload in the background: from the end of the stall until the save can be restored.",
    ),
    click.option("--slowdown", type=SHARE, help="Share of training speed lost while uploading, like 3%."),
    click.option(
        "--bytes",
        "size",
        type=BYTES,
        help="Size of a checkpoint, with --bandwidth; gives --persist, or --stall when that is missing.",
    ),
    click.option("--bandwidth", type=BANDWIDTH, help="Speed of storage for the whole job, like 100GB/s."),
    click.option(
        "--commit",
        type=click.Choice(["eager", "next-save"]),
        default="eager",
        show_default=True,
        help="When a save counts.",
    ),
    click.option(
        "--in-flight",
        type=click.Choice(["one", "many"]),
        default="one",
        show_default=True,
        help="Whether uploads may overlap.",
    ),
    click.option(
        "--tier",
        "tiers",
        multiple=True,
        metavar="NAME:STALL:PERSIST:SURVIVES[:LOAD]",
        help="A faster tier, fastest first, like memory:2s:0s:80%:30s.",
    ),
    click.option("--verify", type=DURATION, help="Time of a check that finds silent corruption."),
    click.option("--per-save-usd", type=USD, default=0.0, help="Price of one save; needs --price."),
]
_AFTER = [
    click.option("--detect", type=DURATION, help="Time until a failure is noticed (hang timeout)."),
    click.option("--reschedule", type=DURATION, help="Time to get machines again."),
    click.option("--load", "--restart", "load", type=DURATION, help="Time to start processes and load the checkpoint."),
    click.option("--warmup", type=DURATION, help="Compilation, caches, first slow steps."),
    click.option(
        "--notice", type=DURATION, help="How long before the stop a notice arrives; checked against the save."
    ),
]
_JOB = [
    click.option(
        "--gpus",
        type=DEVICES,
        help="Devices of the job in which the failures were seen; in a plan --sizes chooses others.",
    ),
    click.option(
        "--per-node", type=Between(1, 100_000, whole=True), default=8, show_default=True, help="Devices in a node."
    ),
    click.option("--nodes", type=DEVICES, help="Nodes, instead of --gpus."),
    click.option("--price", type=USD, help="US dollars for one device for an hour."),
    click.option("--min", "min_interval", type=DURATION, help="Shortest interval allowed."),
    click.option("--max", "max_interval", type=DURATION, help="Longest interval allowed."),
]


def shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of rate, cost, restart and job."""
    for option in reversed([*_FROM, *_RATE, *_COST, *_AFTER, *_JOB]):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user gave, as inputs of the calculator, with where each figure comes from."""

    rates: Rates
    costs: Costs
    job: Job
    provenance: dict[str, str] = field(default_factory=dict)
    """input -> ``measured (n=...)``, ``given``, ``assumed`` or ``derived from ...``"""
    checkpoint_bytes: float | None = None
    notes: tuple[str, ...] = ()
    """What is to be said about the ledger they were read off."""


def read(o: dict[str, Any], **job: Any) -> Asked:
    """Inputs from parsed options. Raises click.UsageError with a sentence for what cannot be."""
    try:
        if o["url"] is not None:
            from elastic.commands.economics.from_run import fill

            fill(o)
        elif (o["options"] or o["client"]) and not any("/" in text for text in o.get("measured", ())):
            raise BadInput("url", "-o and --client say how to read the run of --from: give --from URL")
        nodes = _nodes(o)
        saved, missed, share = _notice(o["notice_share"])
        rates = Rates(
            mtbf_s=o["mtbf"],
            per_1000_node_days=o["rate"],
            job_mtbf_s=o["job_mtbf"],
            failures=o["failures"],
            exposure_s=o["exposure"],
            prior_failures=o["prior_failures"],
            shape=o["shape"],
            lognormal_sigma=o["lognormal"],
            notice_share=share,
            notice_saved=saved,
            notice_missed=missed,
            silent_mtbf_s=o["silent_mtbf"],
        )
        stall, persist, derived = _save_times(o)
        costs = Costs(
            stall_s=stall,
            persist_s=persist,
            slowdown=o["slowdown"] or 0.0,
            commit=o["commit"],
            in_flight=o["in_flight"],
            detect_s=o["detect"] or 0.0,
            reschedule_s=o["reschedule"] or 0.0,
            load_s=o["load"] or 0.0,
            warmup_s=o["warmup"] or 0.0,
            notice_s=o["notice"],
            tiers=tuple(_tier(text) for text in o["tiers"]),
            verify_s=o["verify"],
            per_save_usd=o["per_save_usd"],
        )
        limits = {"min_interval_s": o["min_interval"], "max_interval_s": o["max_interval"]}
        per_node = int(min(o["per_node"], o["gpus"] or o["per_node"]))
        job = {name: value(o) if callable(value) else value for name, value in job.items()}
        wanted = Job(nodes=nodes, devices_per_node=per_node, usd_per_device_hour=o["price"], **limits, **job)
    except BadInput as error:
        refuse(error)
    given = {flag: "given" for flag, name in _NAMES.items() if o.get(name) not in (None, (), 0.0)}
    given.update(derived)
    if all(o[name] is None for name in ("mtbf", "rate", "failures", "job_mtbf")):
        given["rate"] = "assumed"
    given.update(o.get("read_off", {}))
    size = o["size"] or o.get("checkpoint")
    return Asked(rates, costs, wanted, given, size, tuple(o.get("notes", ())))


_NAMES = {
    "mtbf_s": "mtbf", "per_1000_node_days": "rate", "failures": "failures", "exposure_s": "exposure",
    "stall_s": "stall",
    "persist_s": "persist", "slowdown": "slowdown", "detect_s": "detect", "reschedule_s": "reschedule",
    "load_s": "load",
    "warmup_s": "warmup", "notice_share": "notice_share", "tiers": "tiers", "step_s": "step", "nodes": "gpus",
}  # fmt: skip


def _nodes(o: dict[str, Any]) -> int | None:
    if o["gpus"] is not None and o["nodes"] is not None:
        raise BadInput("nodes", "--gpus and --nodes both give the size: give one of them")
    for name in ("gpus", "nodes"):
        if o[name] is not None and (o[name] < 1 or o[name] != int(o[name])):
            raise BadInput("nodes", f"--{name} is {o[name]:g}: give a whole number of at least 1")
    if o["nodes"] is not None:
        return int(o["nodes"])
    if o["gpus"] is None:
        return None
    gpus, per_node = int(o["gpus"]), int(o["per_node"])
    if gpus % per_node and gpus > per_node:
        below = gpus // per_node * per_node
        raise BadInput(
            "devices_per_node",
            f"{gpus} devices are {gpus / per_node:.10g} nodes of {per_node}: "
            f"give {below} or {below + per_node}, or --per-node",
        )
    return max(1, gpus // per_node)


def _save_times(o: dict[str, Any]) -> tuple[float, float, dict[str, str]]:
    size, speed = o["size"], o["bandwidth"]
    if (size is None) != (speed is None):
        raise BadInput("bytes", "--bytes and --bandwidth belong together: give both, or --stall and --persist")
    if size is None:
        if o["stall"] is None and o["persist"] is None and not o["tiers"]:
            raise BadInput(
                "stall_s", "no save cost: give --stall (the time a save holds up training), or --bytes and --bandwidth"
            )
        missing = {} if o["stall"] is not None else {"stall_s": "assumed 0"}
        return o["stall"] or 0.0, o["persist"] or 0.0, missing
    if speed <= 0 or size <= 0:
        raise BadInput(
            "bytes", "--bytes and --bandwidth are above zero: give the size of a checkpoint and the speed of storage"
        )
    seconds = size / speed
    if not 1e-6 <= seconds <= LONGEST_S:
        raise BadInput("bytes", f"--bytes at --bandwidth take {seconds:.3g} s: 1 µs to 10,000 years are accepted")
    if o["persist"] is not None:
        raise BadInput(
            "persist_s", "--persist and --bytes with --bandwidth both give the upload time: give one of them"
        )
    how = f"derived: {units.show_bytes(size)} at {units.show_bytes(speed)}/s"
    if o["stall"] is None:
        return seconds, 0.0, {"stall_s": how}
    return o["stall"], seconds, {"persist_s": how}


def _notice(text: str | None) -> tuple[int | None, int | None, float]:
    if text is None:
        return None, None, 0.0
    if match := re.fullmatch(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*", text):
        return int(match[1]), int(match[2]), 0.0
    try:
        return None, None, units.parse_share(text)
    except units.BadUnit:
        raise BadInput(
            "notice_share", f"{text!r} is not a share of stops: write 0.9, 90% or counts like 9/3 (saved/missed)"
        ) from None


def _tier(text: str) -> Tier:
    parts = text.split(":")
    if len(parts) not in (4, 5):
        raise BadInput(
            "tiers", f"{text!r} is not a tier: write NAME:STALL:PERSIST:SURVIVES[:LOAD], like memory:2s:0s:80%:30s"
        )
    try:
        stall, persist = duration(parts[1]), duration(parts[2])
        load = duration(parts[4]) if len(parts) == 5 else None
        return Tier(name=parts[0], stall_s=stall, persist_s=persist, survives=units.parse_share(parts[3]), load_s=load)
    except units.BadUnit as error:
        raise BadInput("tiers", f"tier {parts[0]!r}: {error}") from None

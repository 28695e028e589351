"""What the calculator is told: how often the job fails, what saving and restarting cost, what the job is.

All times are seconds (``_s``), shares lie in [0, 1), money is US dollars. Values are checked when they are made:
a value that cannot be true raises :class:`BadInput`, whose sentence says what to give instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

DAY_S = 86_400.0
NODE_DAYS = 1000.0
"""Node failure rates are quoted per 1,000 node-days, as operators publish them."""

PRIOR_FAILURES, PRIOR_PER_1000_NODE_DAYS = 1.5, 7.0
"""The assumed prior where nothing is known: published rates span 2.3 to 40 per 1,000 node-days (Llama 3: 3.79,
Meta RSC-1: 6.5 and RSC-2: 2.34, OPT-175B: about 16), so a Gamma of shape 1.5 and mean 7; two failures seen
outweigh it."""


class BadInput(ValueError):
    """An input that cannot be true, or two that contradict each other; the sentence says what to give.

    ``field`` is the name of the input at fault (``mtbf_s``), so that a command line can name its own flag.
    """

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


def _number(field: str, value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadInput(field, f"{field} is {value!r}: give {what} as a finite number")
    return float(value)


def positive(field: str, value: object, what: str) -> float:
    """Return ``value`` as a float above zero, or raise :class:`BadInput` naming ``what`` to give."""
    number = _number(field, value, what)
    if number <= 0:
        raise BadInput(field, f"{field} is {value!r}: give {what}, above zero")
    return number


def not_negative(field: str, value: object, what: str) -> float:
    """Return ``value`` as a float of at least zero, or raise :class:`BadInput` naming ``what`` to give."""
    number = _number(field, value, what)
    if number < 0:
        raise BadInput(field, f"{field} is {value!r}: give {what}, zero or more")
    return number


def share(field: str, value: object, what: str) -> float:
    """Return ``value`` as a float in [0, 1), or raise :class:`BadInput` naming ``what`` to give."""
    number = _number(field, value, what)
    if not 0 <= number < 1:
        raise BadInput(field, f"{field} is {value!r}: give {what}, from 0 to below 1")
    return number


def _check(thing: object, rule: Callable[[str, object, str], float], **what: str) -> None:
    for field, text in what.items():
        value = getattr(thing, field)
        if value is not None:
            rule(field, value, text)


def _whole(thing: object, least: int, **what: str) -> None:
    for field, text in what.items():
        value = getattr(thing, field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise BadInput(field, f"{field} is {value!r}: give {text}, a whole number of at least {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How often the job is interrupted.

    Give one of: ``mtbf_s``; ``per_1000_node_days`` (with ``Job.nodes``); ``failures`` seen in ``exposure_s`` of
    the job's *up-time* (the running attempt included). Failures seen together with a rate make the rate a prior
    worth ``prior_failures`` failures. With nothing at all the prior of this module is assumed for ``Job.nodes``.
    """

    mtbf_s: float | None = None
    """Mean up-time between unplanned interruptions of the whole job."""
    per_1000_node_days: float | None = None
    """Failures that interrupt the job, per 1,000 days of one node."""
    job_mtbf_s: float | None = None
    """A further cause that does not grow with the number of nodes (software, storage outages), as its own MTBF."""
    failures: int | None = None
    exposure_s: float | None = None
    prior_failures: float | None = None
    """How many failures the given or assumed rate is worth against those seen."""
    shape: float | None = None
    """Weibull shape of the up-time between failures; below 1: failures cluster after restarts. None: exponential."""
    lognormal_sigma: float | None = None
    """Lognormal sigma of the up-time between failures, instead of ``shape``."""
    notice_share: float = 0.0
    """Share of interruptions that come with notice and whose save *completed*."""
    notice_saved: int | None = None
    notice_missed: int | None = None
    """Counts of notices whose save completed or did not; they replace ``notice_share`` (Beta(1/2, 1/2) prior)."""
    silent_mtbf_s: float | None = None
    """Mean time between silent corruptions of the state; needs ``Costs.verify_s``."""
    strike_save: bool = True
    strike_recovery: bool = True
    """False: the machinery that can fail is not in use during the save, or during recovery."""

    def __post_init__(self) -> None:
        _check(
            self,
            positive,
            mtbf_s="the mean up-time between failures in seconds",
            exposure_s="the job's up-time in seconds",
        )
        _check(
            self,
            positive,
            per_1000_node_days="failures per 1,000 node-days",
            prior_failures="how many failures the prior is worth",
        )
        _check(self, positive, job_mtbf_s="mean seconds between failures that do not depend on the nodes")
        _check(self, positive, shape="the Weibull shape, near 1", lognormal_sigma="the lognormal sigma, near 1")
        _check(self, positive, silent_mtbf_s="mean seconds between silent errors")
        _check(self, share, notice_share="the measured share of interruptions whose save completed")
        _whole(self, 0, failures="the number of failures seen", notice_saved="notices whose save completed")
        _whole(self, 0, notice_missed="notices whose save did not complete")
        if (self.failures is None) != (self.exposure_s is None):
            lacking = "exposure_s" if self.exposure_s is None else "failures"
            raise BadInput(
                lacking,
                "failures and exposure_s belong together: give both, what was seen and in how much up-time",
            )
        if self.mtbf_s is not None and self.per_1000_node_days is not None:
            raise BadInput("mtbf_s", "mtbf_s and per_1000_node_days both give the failure rate: give one of them")
        if self.shape is not None and self.lognormal_sigma is not None:
            raise BadInput("shape", "shape and lognormal_sigma are two laws of the same up-time: give one of them")
        if self.notice_share and (self.notice_saved is not None or self.notice_missed is not None):
            raise BadInput(
                "notice_share",
                "notice_share and the counts of notices say the same: give the counts alone, they carry more",
            )
        if not self.strike_save and (
            self.shape is not None or self.lognormal_sigma is not None or self.silent_mtbf_s is not None
        ):
            raise BadInput("strike_save", "strike_save=False is modelled for exponential failures alone: leave it out")

    @property
    def observed_notices(self) -> bool:
        """Whether the share of notices that saved was counted rather than stated."""
        return self.notice_saved is not None or self.notice_missed is not None

    @property
    def warned(self) -> float:
        """Share of interruptions that lose no work: the stated one, or the mean of Beta(½+saved, ½+missed)."""
        if not self.observed_notices:
            return self.notice_share
        saved, missed = self.notice_saved or 0, self.notice_missed or 0
        return (0.5 + saved) / (1.0 + saved + missed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """A faster, less durable place for checkpoints: peer memory or local disk."""

    name: str
    stall_s: float
    survives: float
    """Share of failures after which this tier can still be read; slower tiers survive a larger share."""
    persist_s: float = 0.0
    slowdown: float = 0.0
    load_s: float | None = None
    """Time to load from this tier; None: as long as from the durable one."""

    def __post_init__(self) -> None:
        _check(
            self,
            not_negative,
            stall_s=f"the stall of a save to {self.name} in seconds",
            persist_s="seconds until the save can be read back",
        )
        _check(self, not_negative, load_s=f"the time to load from {self.name} in seconds")
        _check(self, share, slowdown="the share of training speed lost while the save is written")
        number = _number("survives", self.survives, "the share of failures that this tier survives")
        if not 0 <= number <= 1:
            raise BadInput(
                "survives",
                f"survives is {self.survives!r}: give the share of failures that {self.name} survives, from 0 to 1",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What a save and a restart cost.

    ``stall_s`` is the time that training stands still for a save: all of it when saves block, the copy alone when
    the upload runs in the background. ``persist_s`` runs from the end of the stall until the checkpoint can be
    restored; meanwhile training is slower by ``slowdown``. After a failure: ``detect_s + reschedule_s`` in which
    nothing runs, then ``load_s + warmup_s`` which a further failure can hit again.
    """

    stall_s: float
    persist_s: float = 0.0
    slowdown: float = 0.0
    commit: Literal["eager", "next-save"] = "eager"
    """``next-save``: a checkpoint becomes restorable only when the *next* save is called (lazy commit)."""
    in_flight: Literal["one", "many"] = "one"
    """Whether uploads may overlap; with one, the next save waits for the previous upload."""
    detect_s: float = 0.0
    reschedule_s: float = 0.0
    load_s: float = 0.0
    warmup_s: float = 0.0
    notice_save_s: float | None = None
    """Time of the save made on notice; None: stall plus persist."""
    notice_s: float | None = None
    """How long before the stop a notice arrives; only used to warn when a save does not fit."""
    tiers: tuple[Tier, ...] = ()
    """Faster tiers, fastest first; the fields above are the durable tier, which every failure leaves readable."""
    verify_s: float | None = None
    """Time of one check that finds silent corruption."""
    per_save_usd: float = 0.0

    def __post_init__(self) -> None:
        seconds = {
            "stall_s": "the time training stands still for a save",
            "persist_s": "the time until a save can be restored",
        }
        seconds |= {
            "detect_s": "the time to notice a failure",
            "reschedule_s": "the time to get machines again",
            "load_s": "the time to load",
        }
        seconds |= {"warmup_s": "the time to warm up after loading", "notice_save_s": "the time of a save on notice"}
        _check(self, not_negative, **{name: f"{text} in seconds" for name, text in seconds.items()})
        _check(self, not_negative, per_save_usd="the price of one save")
        _check(self, positive, notice_s="the notice in seconds", verify_s="the time of one verification in seconds")
        _check(self, share, slowdown="the share of training speed lost while a save is uploaded")
        if self.slowdown and not self.persist_s:
            raise BadInput(
                "slowdown", "slowdown without persist_s slows nothing: give persist_s, the time an upload takes"
            )
        for field, allowed in (("commit", ("eager", "next-save")), ("in_flight", ("one", "many"))):
            if getattr(self, field) not in allowed:
                raise BadInput(field, f"{field} is {getattr(self, field)!r}: give {allowed[0]!r} or {allowed[1]!r}")
        survives = [tier.survives for tier in self.tiers]
        if survives != sorted(survives):
            raise BadInput(
                "tiers",
                "tiers go from the fastest to the most durable: sort them by what they survive",
            )

    @property
    def effective_save_s(self) -> float:
        """Training time that one save takes: stall plus slowdown times persist latency."""
        return self.stall_s + self.slowdown * self.persist_s

    @property
    def dead_s(self) -> float:
        """Time after a failure in which nothing runs."""
        return self.detect_s + self.reschedule_s

    @property
    def recovery_s(self) -> float:
        """Time from machines to the first new step."""
        return self.load_s + self.warmup_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained, and what its machines cost."""

    nodes: int | None = None
    devices_per_node: int = 8
    step_s: float | None = None
    """Time of one training step; then the answer is a whole number of steps."""
    align_steps: int = 1
    """The interval is a multiple of this many steps (evaluation, logging)."""
    work_s: float | None = None
    """Training time of the whole job without failures and saves; None: long compared with the interval."""
    final_save: bool = True
    """Whether a finite job ends with a save."""
    current_s: float | None = None
    """The interval in use now, to compare with."""
    usd_per_device_hour: float | None = None
    min_interval_s: float | None = None
    max_interval_s: float | None = None
    keep: int | None = None
    """Checkpoints kept; with ``detection_latency_s`` checked against errors that are noticed late."""
    detection_latency_s: float | None = None

    def __post_init__(self) -> None:
        _whole(
            self,
            1,
            nodes="the number of nodes",
            devices_per_node="devices in a node",
            align_steps="steps to align to",
            keep="checkpoints kept",
        )
        _check(
            self, positive, step_s="the time of one step in seconds", work_s="the training time of the job in seconds"
        )
        _check(
            self,
            positive,
            current_s="the interval in use in seconds",
            usd_per_device_hour="the price of one device for an hour",
        )
        _check(
            self,
            positive,
            min_interval_s="the shortest interval in seconds",
            max_interval_s="the longest interval in seconds",
        )
        _check(self, positive, detection_latency_s="the mean time until a late-noticed error is seen, in seconds")
        if self.align_steps > 1 and self.step_s is None:
            raise BadInput("step_s", "align_steps needs step_s: give the time of one step")
        if self.min_interval_s and self.max_interval_s and self.min_interval_s > self.max_interval_s:
            raise BadInput("min_interval_s", "min_interval_s is above max_interval_s: swap them or give one of them")

    @property
    def devices(self) -> int | None:
        """Accelerators of the job, None when the number of nodes is not known."""
        return None if self.nodes is None else self.nodes * self.devices_per_node

    @property
    def usd_per_s(self) -> float | None:
        """What one second of the whole job costs, None when nodes or price are not known."""
        if self.devices is None or self.usd_per_device_hour is None:
            return None
        return self.devices * self.usd_per_device_hour / 3600.0


def given(thing: Rates | Costs | Job) -> dict[str, object]:
    """The fields of ``thing`` that differ from their defaults, as plain values for records and JSON."""
    out: dict[str, object] = {}
    for field in fields(thing):
        value = getattr(thing, field.name)
        if field.name == "tiers":
            value = [{f.name: getattr(tier, f.name) for f in fields(tier)} for tier in value]
        if value != field.default and value != []:
            out[field.name] = value
    return out

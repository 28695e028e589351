"""The drills that come with the tool, by name."""

from __future__ import annotations

from drills.errors import Usage
from drills.faults.clock import ClockJump
from drills.faults.disk import FullDisk
from drills.faults.memory import FlipRestoredBit
from drills.faults.process import Freeze, Kill, KillAgent, KillJob, Stale, Terminate
from drills.faults.rest import Damage
from drills.faults.slow import MemorySqueeze, Throttle
from drills.faults.storage import StorageFault
from drills.scenario import Scenario, Strike
from drills.schedule import When

_PROCESSES = (
    Scenario(
        name="kill-any-rank",
        summary="SIGKILL to a random rank at a random step, after the first committed step.",
        proves="The job notices, restarts, restores the newest committed step, and ends bit for bit as if "
        "nothing had happened.",
        strikes=(Strike(fault=Kill()),),
    ),
    Scenario(
        name="kill-rank-0",
        summary="SIGKILL to rank 0, which commits and keeps the ledger.",
        proves="No rank is special: the job comes back without the one that coordinates.",
        strikes=(Strike(fault=Kill(), when=When(rank=0)),),
    ),
    Scenario(
        name="kill-all",
        summary="SIGKILL to every rank at the same instant.",
        proves="Nothing that is needed for the restore lives only in memory.",
        strikes=(Strike(fault=Kill(which="all")),),
    ),
    Scenario(
        name="kill-in-save",
        summary="SIGKILL to a rank while the first write of its data is held.",
        proves="A save that was cut off is never taken for a step, and the one before it is whole.",
        strikes=(Strike(fault=Kill(), when=When(phase="save")),),
    ),
    Scenario(
        name="kill-in-commit",
        summary="SIGKILL to the rank that commits while the commit record is held.",
        proves="A step whose commit did not arrive does not count, although all its data are there.",
        strikes=(Strike(fault=Kill(), when=When(phase="commit")),),
    ),
    Scenario(
        name="kill-in-load",
        summary="SIGKILL to a rank, and again to the first one that reads the step to come back.",
        proves="A restore that was cut off harms nothing: the next one finds the same step.",
        strikes=(Strike(fault=Kill()), Strike(fault=Kill(), when=When(phase="load"))),
    ),
    Scenario(
        name="crash-loop",
        summary="SIGKILL to a rank three times, each time as soon as the job is back.",
        proves="A job that keeps dying gets on, and is right in the end.",
        strikes=(Strike(fault=Kill()), *[Strike(fault=Kill(), when=When(after="back"))] * 2),
    ),
    Scenario(
        name="agent-killed",
        summary="SIGKILL to the launcher alone; the command is started again beside its orphaned workers.",
        proves="Of two starts that are alive at once the older one gives up, and harms nothing.",
        strikes=(Strike(fault=KillAgent()),),
        reaction="start again",
    ),
    Scenario(
        name="stale-writer",
        summary="The whole job is stopped as it commits; another start takes over; then the old one goes on.",
        proves="The late commit of a writer that was overtaken never counts, and the writer gives up.",
        strikes=(Strike(fault=Stale(), when=When(phase="commit"), until_back=True),),
        reaction="start again",
    ),
    Scenario(
        name="sigterm-short-notice",
        summary="SIGTERM to the command, 20 s before everything is killed; then it is started again.",
        proves="The notice is enough to save: not one step is trained twice.",
        strikes=(Strike(fault=Terminate()),),
        reaction="start again",
        lossless=True,
    ),
    Scenario(
        name="shrink-and-grow",
        summary="The job is killed and started again on one rank less, and later on as many as before.",
        proves="Any number of ranks goes on where another stopped, and sees each sample exactly once.",
        strikes=(
            Strike(fault=KillJob(world=-1)),
            Strike(fault=KillJob(world=0), when=When(after="commit")),
        ),
        reaction="start again",
    ),
    Scenario(
        name="frozen-rank",
        summary="SIGSTOP to a rank for three seconds.",
        proves="A pause is no failure: the others wait, and nothing is lost.",
        strikes=(Strike(fault=Freeze(), for_s=3.0),),
        reaction="endure",
    ),
    Scenario(
        name="slow-rank",
        summary="A rank gets a fifth of its time for five seconds.",
        proves="A slow rank slows the others down, and changes nothing else.",
        strikes=(Strike(fault=Throttle(), for_s=5.0),),
        reaction="endure",
    ),
    Scenario(
        name="memory-squeeze",
        summary="A rank may take no more memory than it has, for four seconds.",
        proves="Out of memory is an error like any other: the job lives through it, or comes back.",
        strikes=(Strike(fault=MemorySqueeze(), for_s=4.0),),
        reaction="any",
    ),
    Scenario(
        name="clock-jump",
        summary="The clock of the target's processes jumps back an hour, and stays there.",
        proves="No decision hangs on the time of day: not the choice of the newest step, nor a deadline.",
        strikes=(Strike(fault=ClockJump(offset_s=-3600.0)), Strike(fault=Kill(), when=When(wait_s=0.2, after="start"))),
    ),
)

_STORAGE = (
    Scenario(
        name="storage-503-storm",
        summary="Every other request is answered 503 SlowDown for six seconds.",
        proves="A storage that is overloaded delays saves, and ends nothing.",
        strikes=(Strike(fault=StorageFault(kind="status", probability=0.5), for_s=6.0),),
        reaction="endure",
        needs="s3",
    ),
    Scenario(
        name="storage-outage",
        summary="Nothing reaches the storage for six seconds, from the middle of a save on.",
        proves="An outage costs time, not the run: it is waited out, or the next save makes up for it.",
        strikes=(Strike(fault=StorageFault(kind="reset"), when=When(phase="save"), for_s=6.0),),
        reaction="any",
    ),
    Scenario(
        name="storage-slow",
        summary="Every request takes 0.3 s longer, for eight seconds.",
        proves="Slow storage makes saves late, never wrong.",
        strikes=(Strike(fault=StorageFault(kind="slow", delay_s=0.3), for_s=8.0),),
        reaction="endure",
    ),
    Scenario(
        name="storage-truncates",
        summary="A rank is killed, and a third of the answers end after 100 bytes while the job loads.",
        proves="A body that was cut short is noticed and read again, never loaded.",
        strikes=(
            Strike(fault=Kill()),
            Strike(fault=StorageFault(kind="truncate", operation="get", probability=0.34), when=When(phase="load"),
                   for_s=10.0),
        ),
        needs="s3",
    ),
    Scenario(
        name="storage-duplicates",
        summary="Every write is done twice by the server, for six seconds.",
        proves="A request that is repeated on its way makes no second step and no conflict.",
        strikes=(Strike(fault=StorageFault(kind="duplicate", operation="put"), for_s=6.0),),
        reaction="endure",
        needs="s3",
    ),
    Scenario(
        name="disk-full",
        summary="The disk of the run has not a byte left for two seconds, from the middle of a save on.",
        proves="A save that finds no room leaves the older steps whole, and the next one is made.",
        strikes=(Strike(fault=FullDisk(), when=When(phase="save"), for_s=2.0),),
        reaction="any",
        needs="local",
    ),
    Scenario(
        name="bit-rot-newest",
        summary="The job is killed, one bit of its newest step flips, and the command is started again.",
        proves="Damage is found before it is loaded, and the step before it restored.",
        strikes=(Strike(fault=Damage(), when=When(commits=2)),),
        reaction="start again",
    ),
    Scenario(
        name="all-steps-but-one-bad",
        summary="The job is killed, every committed step but the oldest of three is damaged, and it is started again.",
        proves="The newest step that is whole is found behind all those that are not.",
        strikes=(Strike(fault=Damage(which="all-but-oldest", kind="delete"), when=When(commits=3)),),
        reaction="start again",
    ),
)  # fmt: skip

_ORACLE = (
    Scenario(
        name="flip-restored-byte",
        summary="The same kill, and then one bit of the restored model is flipped in the target's memory.",
        proves="The oracle sees a single wrong bit: if this drill does not fail, no pass of another one means "
        "anything.",
        strikes=(Strike(fault=Kill()), Strike(fault=FlipRestoredBit())),
        meant_to_fail="One bit of the restored state is made wrong on purpose. A verdict of fail that names a "
        "tensor shows that the drill can see; the product is not at fault.",
    ),
)

BOOK: dict[str, Scenario] = {s.name: s for s in (*_PROCESSES, *_STORAGE, *_ORACLE)}


def find(name: str) -> Scenario:
    """The drill of that name, or in that TOML file. Raises ``Usage`` with the names there are."""
    if name in BOOK:
        return BOOK[name]
    if name.endswith(".toml"):
        from pathlib import Path

        from drills.toml import read

        return read(Path(name))
    raise Usage(f"there is no drill called {name!r}",
                facts=[("drills", ", ".join(BOOK))], hint="drills list") from None  # fmt: skip

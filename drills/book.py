"""The drills that come with the tool, by name."""

from __future__ import annotations

from drills.errors import Usage
from drills.faults.memory import FlipRestoredBit
from drills.faults.process import Kill
from drills.scenario import Scenario

BOOK: dict[str, Scenario] = {
    s.name: s
    for s in (
        Scenario(
            name="kill-any-rank",
            summary="SIGKILL to a random rank at a random step, after the first committed step.",
            proves="The job notices, restarts, restores the newest committed step, and ends bit for bit as if "
            "nothing had happened.",
            faults=(Kill(),),
        ),
        Scenario(
            name="flip-restored-byte",
            summary="The same kill, and then one bit of the restored model is flipped in the target's memory.",
            proves="The oracle sees a single wrong bit: if this drill does not fail, no pass of another one means "
            "anything.",
            faults=(Kill(), FlipRestoredBit()),
            meant_to_fail="One bit of the restored state is made wrong on purpose. A verdict of fail that names a "
            "tensor shows that the drill can see; the product is not at fault.",
        ),
    )
}


def find(name: str) -> Scenario:
    """The drill of that name. Raises ``Usage`` with the names there are."""
    try:
        return BOOK[name]
    except KeyError:
        raise Usage(f"there is no drill called {name!r}",
                    facts=[("drills", ", ".join(BOOK))], hint="drills list") from None  # fmt: skip

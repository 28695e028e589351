from __future__ import annotations

import json
from pathlib import Path

import pytest

from drills.errors import Usage
from drills.history import FILE, History, load
from drills.scenario import plan_from_json, plan_to_json
from drills.schedule import When
from tests.unit.drills.records import plan


def test_a_history_is_replayed_as_it_was_written(tmp_path: Path) -> None:
    heard: list[str] = []
    with History(tmp_path, lambda e: heard.append(e["event"])) as h:
        h.begin(plan(), {"python": "3.11"})
        h.add("run.started", run="control", url="file:///x", argv=["a"], pid=1, start=1, t=10.0)
        h.add("process.seen", run="control", pid=5, rank=0, born=77, started=11.0)
        h.add("process.ended", run="control", pid=5, rank=0, t=12.0)
        h.add("process.seen", run="control", pid=5, rank=0, born=99, started=13.0)  # the same number, another process
        h.add("commit.seen", run="control", step=4, name="n", folder="f", t=12.5)
        h.add("run.ended", run="control", status=0, stopped=None, t=14.0)
        h.add("moment", step=3, rank=1)
        h.add("fault.proved", fault="kill", evidence={"said": "gone"})
        h.add("compared", left="control", right="drilled", pairs=[], reason="none", final=[1, 2])
        h.add("something.newer", value=1)
        h.add("broke", said="no")
    (tmp_path / "control").mkdir()
    (tmp_path / "control/log.jsonl").write_text('{"step": 0, "rank": 0}\n{"step": 1, "rank": 0}\n')
    record = load(tmp_path)
    run = record.runs["control"]
    assert [(p.born, p.ended) for p in run.procs] == [(77, 12.0), (99, None)]
    assert (run.seconds, run.status, run.first_commit(), run.newest_commit(12.4), run.newest_commit(13)) == (
        4.0,
        0,
        4,
        None,
        4,
    )
    assert run.log.last_step == 2  # counted from 0 in the log
    assert record.evidence == {"kill": {"said": "gone"}}
    assert record.compared["control", "drilled"]["reason"] == "none"
    assert record.broke == ["no"]
    assert heard[0] == "drill"


def test_a_plan_survives_but_its_secrets_do_not() -> None:
    command = ("train.py", "{url}", "--option", "secret=hush", "--api-token=hush", "{log}")
    p = plan(when=When(at_step=4), skip=("rng",), storage_options=(("key", "id"), ("secret", "hush")), command=command)
    raw = json.dumps(plan_to_json(p))
    assert "hush" not in raw
    again = plan_from_json(json.loads(raw))
    assert again.storage_options == (("key", "***"), ("secret", "***"))
    assert (again.when, again.skip, again.targets) == (p.when, p.skip, p.targets)
    assert again.command == ("train.py", "{url}", "--option", "secret=***", "--api-token=***", "{log}")


@pytest.mark.parametrize(
    "content", [None, "", "{}\n", '{"event": "drill", "schema": "drills.history/9"}\n', "no json\n"]
)
def test_another_folder_is_refused_with_a_reason(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(Usage, match="not the folder of a drill"):
        load(tmp_path)

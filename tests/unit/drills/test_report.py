from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from drills.book import BOOK
from drills.checks import judge
from drills.history import Record
from drills.report.document import document
from drills.report.html import page
from drills.report.render import head, show, table
from drills.report.story import replay_line
from tests.unit.drills.records import KILLED, compared, control, element, good, pair, plan, with_lines

KILL, FLIP = BOOK["kill-any-rank"], BOOK["flip-restored-byte"]


def failed() -> Record:
    return good(compared={("control", "drilled"): compared(pair(10), pair(20, element("model.w<script>"), epoch=2))})


def early() -> Record:
    run = replace(control(), status=1, said="<b>ValueError</b>: no data")
    return good(runs={"control": run}, evidence={}, compared={}, ended_early="the control run ended with status 1",
                moment=None, advice="make it end well first")  # fmt: skip


def broke() -> Record:
    return good(broke=["rank 1 was gone before the fault"])


RECORDS = {"good": good, "failed": failed, "early": early, "broke": broke}


class Page(HTMLParser):
    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        for name, _ in attrs:
            assert name not in ("src", "onload", "onclick")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("which", RECORDS)
def test_the_page_is_whole_and_needs_nothing_from_outside(which: str) -> None:
    record = RECORDS[which]()
    html = page(record, KILL, judge(record, KILL))
    seen = Page(html)
    assert "script" not in seen.tags
    assert "link" not in seen.tags
    assert not re.search(r"https?://|url\(|@import|//[a-z]+\.", html.replace("file://", ""))
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_the_page_answers_the_questions_of_somebody_who_was_not_there() -> None:
    text = " ".join("".join(Page(page(good(), KILL, judge(good(), KILL))).text).split())
    for said in (
        "Rank 0 (pid 100) was killed with SIGKILL after step 12 of 20.",
        "Yes, by itself: first new step 8.5 s after the fault",
        "2 steps trained twice (11-12, 2.5 s of work); no sample lost, none repeated. It went on from step 10.",
        "Yes, bit for bit: 12 tensors (2.0 KiB) and 3 values equal in steps 5, 10, 15, 20.",
        "Nothing: every check that was asked for was made.",
        "drills run kill-any-rank --seed 7 --at-step 12 --rank 0 -- torchrun train.py {url} --log-file {log}",
    ):
        assert said in text


def test_what_comes_from_the_target_is_escaped() -> None:
    for record in (failed(), early()):
        html = page(record, KILL, judge(record, KILL))
        assert "<script>" not in html
        assert "<b>" not in html


def test_pictures_have_every_rank_the_fault_and_both_curves() -> None:
    html = page(good(), KILL, judge(good(), KILL))
    assert html.count('class="strike"') == 2  # once for a desk, once for a phone
    assert html.count(">rank 0</text>") == html.count(">rank 1</text>") == 2
    assert html.count('<polyline class="control"') == html.count('<polyline class="drilled"') == 2
    assert html.count('class="again"') == 4


def test_a_run_without_losses_has_no_curve_and_still_a_page() -> None:
    record = with_lines(good(), "drilled", lambda n: replace(n, loss=None))
    assert "<polyline" not in page(record, KILL, judge(record, KILL))


def test_a_page_of_many_steps_stays_small() -> None:
    record = good()
    lines = record.runs["drilled"].log.lines
    many = tuple(replace(lines[-1], step=n, t=1030.0 + n / 1e4, loss=1.0 / n) for n in range(1, 8_000))
    record.runs["drilled"].log = replace(record.runs["drilled"].log, lines=many)
    assert len(page(record, KILL, judge(record, KILL))) < 400_000


def test_a_drill_that_is_meant_to_fail_says_so_on_top() -> None:
    record = good(compared={("control", "drilled"): compared(pair(10), pair(20, element("model.w"), epoch=2))})
    record.evidence["flip-restored-bit"] = {"tensor": "w", "index": [0], "said": "bit 11 of w[0] flipped", "t": KILLED}
    record.healed["flip-restored-bit"] = "nothing to undo"
    checks = judge(record, FLIP)
    said = dict(head(record, FLIP, checks))
    assert said["meant"].startswith("This drill is meant to fail, and did as it should: model.w differs.")
    assert "This drill is meant to fail" in page(record, FLIP, checks)
    doc = document(record, FLIP, checks)
    assert (doc["verdict"], doc["exit_status"], doc["meant_to_fail"], doc["as_meant"]) == ("fail", 1, True, True)


@pytest.mark.parametrize(
    ("which", "verdict", "status"),
    [("good", "pass", 0), ("failed", "fail", 1), ("early", "not verified", 3), ("broke", "harness broke", 70)],
)
def test_the_document_has_its_schema_and_survives_json(which: str, verdict: str, status: int) -> None:
    record = RECORDS[which]()
    doc = json.loads(json.dumps(document(record, KILL, judge(record, KILL))))
    assert doc["schema"] == "drills.run/1"
    assert (doc["verdict"], doc["exit_status"]) == (verdict, status)
    assert {c["verdict"] for c in doc["checks"]} <= {"pass", "fail", "not verified", "harness broke"}
    assert doc["plan"]["seed"] == 7


def test_the_table_gives_reasons_only_where_there_is_one_to_give() -> None:
    lines = table(judge(failed(), KILL))
    row = next(n for n, text in enumerate(lines) if text.startswith("state bitwise"))
    assert "fail" in lines[row]
    assert "first at step 20: model.w<script>[3, 1] is 0.25, in the control run 0.5" in lines[row + 1]
    assert len(table(judge(good(), KILL))) == len(judge(good(), KILL)) + 1


def test_the_terminal_gets_plain_text_when_it_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    show(good(), KILL, judge(good(), KILL), report="out/report.html")
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "verdict  PASS" in out


def test_the_replay_line_pins_what_was_drawn_and_keeps_what_was_asked() -> None:
    p = plan(control_runs=2, resubmit=1, skip=("samples",), default_url=False, url_base="s3://b/x/kill-any-rank-1",
             storage_options=(("endpoint_url", "http://h:1"), ("secret", "***")),
             command=("python", "a b.py", "{url}", "--x={log}"))  # fmt: skip
    assert replay_line(p, {"step": 3, "rank": 1}) == (
        "drills run kill-any-rank --seed 7 --at-step 3 --rank 1 --control-runs 2 --resubmit 1 --url-base s3://b/x"
        " --storage-option endpoint_url=http://h:1 --skip samples -- python 'a b.py' {url} '--x={log}'"
    )

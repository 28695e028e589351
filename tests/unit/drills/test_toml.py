"""Drills as TOML: the whole book survives, and a wrong word is answered with those there are."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from drills import toml
from drills.book import BOOK, find
from drills.errors import Usage

HEAD = 'name = "x"\nsummary = "s"\nproves = "p"\n'


@pytest.mark.parametrize("name", BOOK)
def test_every_drill_of_the_book_is_the_same_after_a_round_trip(name: str) -> None:
    scenario = BOOK[name]
    assert toml.from_dict(tomllib.loads(toml.dumps(scenario))) == scenario
    assert toml.from_dict(toml.to_dict(scenario)) == scenario


def test_a_file_is_a_drill(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(toml.EXAMPLE)
    scenario = find(str(path))
    assert scenario.name == "kill-in-commit-twice"
    assert [s.when.phase for s in scenario.strikes] == ["commit", None]
    assert scenario.targets.first_step_s == 60.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 1", "summary is missing"),
        (HEAD, "strike is missing"),
        (HEAD + "strike = 3", "[[strike]]"),
        (HEAD + '[[strike]]\nfault = "kil"', "strike 1: fault = 'kil': one of kill, kill-job"),
        (HEAD + '[[strike]]\nfault = "kill"\nshare = 1', "strike 1: share is not known here"),
        (HEAD + '[[strike]]\nfault = "kill"\nwhich = "two"', "strike 1: which = 'two': one or all"),
        (HEAD + '[[strike]]\nfault = "throttle"\nshare = "a"', "strike 1: share = 'a': has to be a number"),
        (HEAD + '[[strike]]\nfault = "kill"\nwhen = { phase = "nap" }', "phase = 'nap': one of save, commit, load"),
        (HEAD + '[[strike]]\nfault = "kill"\nwhen = { step = 3 }', "strike 1: when.step is not known here"),
        (HEAD + '[[strike]]\nfault = "kill"\nwhen = { after = "back" }', "the first strike cannot wait"),
        (HEAD + 'reaction = "dance"\n[[strike]]\nfault = "kill"', "reaction = 'dance': one of restart, endure"),
        (HEAD + '[targets]\nfirst_step = 3\n[[strike]]\nfault = "kill"', "targets.first_step is not known here"),
        (HEAD + '[[strike]]\nfault = "storage"\nkind = "melt"', "kind = 'melt': one of status, reset"),
        ("name = ", "is not TOML"),
    ],
)
def test_a_wrong_word_is_answered_with_those_there_are(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(Usage) as e:
        find(str(path))
    assert said in str(e.value)
    assert "mine.toml" in str(e.value)


def test_a_file_that_is_not_there_is_usage() -> None:
    with pytest.raises(Usage, match="cannot be read"):
        find("/no/such.toml")

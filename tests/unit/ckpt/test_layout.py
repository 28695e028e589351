"""Names on the store: what is built is what is taken apart, and nothing else is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format import layout
from ckpt.format.layout import Attempt, Epoch

nonces = st.just("") | st.text("0123456789abcdef", min_size=8, max_size=8)
epochs = st.builds(Epoch, st.integers(0, 10**8 - 1), nonces)
attempts = st.builds(Attempt, st.integers(0, 10**12 - 1), epochs, st.integers(0, 10**6))


@given(attempts)
def test_attempt_names_round_trip(a: Attempt) -> None:
    assert layout.parse_attempt(str(a)) == a
    assert layout.parse_record_key(a.commit_key, layout.COMMITS) == a
    assert layout.parse_record_key(a.quarantine_key, layout.QUARANTINE) == a
    assert layout.parse_record_key(a.retire_key, layout.RETIRE) == a
    assert layout.parse_step_key(a.prefix + "index/00003.json") == a
    assert layout.parse_record_key(a.commit_key, layout.RETIRE) is None


@given(epochs)
def test_epoch_names_round_trip(e: Epoch) -> None:
    assert layout.parse_epoch_key(e.claim_key) == (e, False)
    assert layout.parse_epoch_key(e.base_key) == (e, True)


@given(attempts, attempts)
def test_names_sort_as_attempts_do(a: Attempt, b: Attempt) -> None:
    if a.counter < 10 and b.counter < 10 and not (a.epoch.nonce or b.epoch.nonce):
        assert (str(a) < str(b)) == (a < b)


@given(st.integers(0, 99_999), st.integers(0, 10**4))
def test_object_names_tell_their_rank(rank: int, n: int) -> None:
    assert layout.data_rank(layout.data_name(rank, n)) == rank
    assert layout.index_rank(layout.index_name(rank)) == rank
    assert layout.index_rank(layout.data_name(rank, n)) is None
    assert layout.data_rank(layout.index_name(rank)) is None


@given(st.text(max_size=40))
def test_foreign_names_are_none(name: str) -> None:
    a = layout.parse_attempt(name)
    assert a is None or str(a) == name
    assert layout.parse_record_key(name, layout.COMMITS) is None or name.startswith("commits/")


@pytest.mark.parametrize(
    "name",
    [
        "000000000042-e00000001-0\n",
        "000000000042-e00000001-",
        "42-e1-0",
        "000000000042-e00000001.XYZ-0",
        "000000000042-e00000001-0.json",
        "000000000042-e00000001-00",
        "000000000042-e00000001-1234567890",
        "\u0660" * 12 + "-e00000001-0",
    ],
)
def test_near_misses_are_no_attempts(name: str) -> None:
    assert layout.parse_attempt(name) is None


@pytest.mark.parametrize(
    "key", ["epochs/\u0660" + "0" * 7 + ".json", "epochs/1.json", "epochs/00000001.base", "00000001.json"]
)
def test_near_misses_are_no_epochs(key: str) -> None:
    assert layout.parse_epoch_key(key) is None

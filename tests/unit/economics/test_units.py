import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6h", 21_600),
        ("40s", 40),
        ("3.1h", 11_160),
        ("90 min", 5400),
        ("1h30m", 5400),
        ("1d 2h", 93_600),
        ("250ms", 0.25),
        ("1e3 s", 1000),
        (".5h", 1800),
        ("2w", 1_209_600),
    ],
)
def test_durations(text, seconds):
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "6", "h", "6h7", "6 parsec", "1,5h", "nan s", "inf h", "6h!", "--"])
def test_not_durations(text):
    with pytest.raises(units.BadUnit, match=r"write it like|use ms"):
        units.parse_duration(text)


def test_other_quantities():
    assert units.parse_bytes("2TB") == 2e12
    assert units.parse_bytes("512MiB") == 512 * 2**20
    assert units.parse_bytes("7 B") == 7
    assert units.parse_bandwidth("100GB/s") == 1e11
    assert units.parse_bandwidth("20Gbit/s") == 2.5e9
    assert units.parse_bandwidth("1.5GiB/s") == 1.5 * 2**30
    assert units.parse_rate("3.79/1000nd") == pytest.approx(3.79)
    assert units.parse_rate("0.0065/nd") == pytest.approx(6.5)
    assert units.parse_rate("1/year") == pytest.approx(1000 / 365.25)
    assert units.parse_share("80%") == units.parse_share("0.8") == 0.8
    assert units.parse_count("405B") == 405e9
    assert units.parse_count("15.6T") == pytest.approx(15.6e12)
    for parse, text in (
        (units.parse_bytes, "2"),
        (units.parse_bytes, "2 apples"),
        (units.parse_bandwidth, "2GB"),
        (units.parse_rate, "3"),
        (units.parse_rate, "3/0nd"),
        (units.parse_share, "x"),
        (units.parse_count, "1Q"),
    ):
        with pytest.raises(units.BadUnit, match="write it"):
            parse(text)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0123, "12.3 ms"),
        (40, "40 s"),
        (118.9, "119 s"),
        (334.8, "5.58 min"),
        (11_135, "3.09 h"),
        (86_400 * 54, "54 days"),
        (1e9, "31.7 years"),
        (0, "0 ms"),
    ],
)
def test_shown_durations(value, shown):
    assert units.show_duration(value) == shown


def test_shown_numbers():
    assert [units.show_number(v) for v in (0, 1234567, 0.97, 20.44, 5.0, 999.6, 1e-7, 0.1 + 0.2)] == [
        "0",
        "1,230,000",
        "0.97",
        "20.4",
        "5",
        "1,000",
        "1.00e-07",
        "0.3",
    ]
    assert [units.show_bytes(v) for v in (2e12, 999.9e9, 5.67e12, 12)] == ["2 TB", "1 TB", "5.67 TB", "12 B"]


@given(st.floats(1e-3, 1e9))
def test_shown_durations_read_back_within_their_digits(seconds):
    text = units.show_duration(seconds)
    if "years" not in text:
        assert units.parse_duration(text.replace(",", "")) == pytest.approx(seconds, rel=6e-3)

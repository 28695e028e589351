"""``elastic interval`` and ``elastic plan`` as typed: golden texts, JSON, sentences for what cannot be, lazy imports.

Golden files hold what is printed; rewrite them with ``GOLDEN=write pytest tests/cli`` and read the difference.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from elastic.cli import COMMANDS, cli
from tests.unit.elastic.test_history import life, steps, trained, write

TIERED = "--mtbf 3h --save 60s --tier memory:2s:0s:80%:1min"
GOLDEN = Path(__file__).parent / "golden"
LLAMA = "--gpus 16384 --rate 3.79/1000nd --stall 5s --persist 2min --detect 4min --reschedule 1min --load 10min"
CASES = {
    "elastic_help": "--help",
    "interval_help": "interval --help",
    "interval_shortest": "interval --mtbf 6h --save 40s",
    "interval_llama3": f"interval {LLAMA} --step 12.4s --price 2.5 --current 500steps",
    "interval_seen": "interval --failures 3 --exposure 24h --bytes 2TB --bandwidth 50GB/s --plot",
    "interval_assumed": "interval --gpus 1024 --save 40s --restart 10min --step 3s --work 30d",
    "interval_tiers": "interval --mtbf 3h --save 60s --tier memory:2s:0s:80%:1min "
    "--tier disk:5s:0s:95%:2min --load 10min",
    "interval_spot": "interval --mtbf 2h --save 30s --notice-share 9/3 --notice 30s --persist 10s --target-goodput 97%",
    "interval_bound": "interval --mtbf 3h --stall 0.2s --persist 15min --slowdown 3% --commit next-save --load 5min",
    "interval_hopeless": "interval --mtbf 10min --save 20min",
    "plan_help": "plan --help",
    "plan_sizes": "plan --gpus 16384 --rate 3.79/1000nd --save 60s --restart 15min "
    "--measured 8192:20s --measured 16384:11s",
    "plan_deadline": "plan --gpus 16384 --rate 3.79/1000nd --stall 5s --persist 2min --restart 15min --price 2.5"
    " --params 405B --tokens 15.6T --deadline 60d --manual-share 0.7%",
}


def run(line):
    return CliRunner().invoke(cli, line.split(), prog_name="elastic", terminal_width=80)


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    result = run(CASES[name])
    assert result.exit_code == 0, result.output
    file = GOLDEN / f"{name}.txt"
    text = f"$ elastic {CASES[name]}\n{result.stdout}"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_the_answer_for_a_large_job_fits_a_screen():
    lines = run(CASES["interval_llama3"]).stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) < 80
    assert lines[-1] == 'In code: elastic.Run(url, state, every="27 steps"), or every="auto".'
    assert lines[0].startswith("Save every 27 steps (5.58 min)")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("interval --mtbf 6 --save 40s", "write it like 40s, 90min"),
        ("interval --mtbf 6parsecs --save 40s", "not a unit of time"),
        ("interval --mtbf 0s --save 40s", "--mtbf is 0.0: give the mean up-time"),
        ("interval --mtbf -3h --save 40s", "--mtbf is -10800.0: give"),
        ("interval --mtbf nan --save 40s", "is not a duration"),
        ("interval --mtbf 1e999h --save 40s", "too large"),
        ("interval --save 40s", "no failure rate: give --mtbf"),
        ("interval --mtbf 3h", "no save cost: give --stall"),
        ("interval --mtbf 3h --rate 3/1000nd --save 4s", "--mtbf and --rate both give"),
        ("interval --rate 3/1000nd --save 4s", "give --gpus or --nodes"),
        ("interval --rate 3 --gpus 8 --save 4s", "like 3.79/1000nd"),
        ("interval --mtbf 3h --bytes 2TB", "--bytes and --bandwidth belong together"),
        ("interval --mtbf 3h --bytes 2 --bandwidth 1GB/s", "like 2TB"),
        ("interval --mtbf 3h --bytes 2TB --bandwidth 5", "like 100GB/s"),
        ("interval --failures 3 --save 4s", "--failures and --exposure belong together"),
        ("interval --mtbf 3h --save 4s --current 500steps", "needs --step"),
        ("interval --mtbf 3h --save 4s --current fast", "like 30min or 500steps"),
        ("interval --mtbf 3h --save 4s --tier memory:2s", "NAME:STALL:PERSIST:SURVIVES"),
        ("interval --mtbf 3h --save 4s --tier memory:2:0s:80%", "not a duration"),
        ("interval --mtbf 3h --save 4s --notice-share all", "counts like 9/3"),
        ("interval --mtbf 3h --save 4s --notice-share 1.0", "from 0 to below 1"),
        ("interval --mtbf 3h --save 4s --gpus 8 --nodes 1", "give one of them"),
        ("interval --mtbf 3h --save 4s --gpus 100", "100 devices are 12.5 nodes of 8: give 96 or 104, or --per-node"),
        ("interval --mtbf 3h --save 4s --target-goodput 2", "a share between 0 and 1"),
        ("interval --mtbf 3h --save 4s --shape 0.7 --notice-share 50%", "not modelled"),
        ("interval --mtbf 3h --save 4s --align 50", "--step: give"),
        ("interval --mtbf 3h --save 40", "seconds? write it with its unit"),
        ("interval --mtbf 3h --save 0s", "saving that costs nothing has no best interval: give --stall"),
        ("interval --mtbf 3h --save -4s", "--stall is -4.0: give"),
        ("interval --mtbf 3h --save nan", "is not a duration"),
        ("interval --mtbf 3h --save inf", "is not a duration"),
        ("interval --failures -1 --exposure 24h --save 4s", "a whole number from 0 to 1,000,000 is accepted"),
        ("interval --failures 3 --exposure 0s --save 4s", "--exposure is 0.0: give the job's up-time"),
        ("interval --rate nan/1000nd --gpus 8 --save 4s", "like 3.79/1000nd"),
        ("interval --mtbf 3h --bytes 2TB --bandwidth 0GB/s", "--bytes and --bandwidth are above zero"),
        ("interval --mtbf 3h --bytes 2TB --bandwidth 1GB/s --stall 1s --persist 9s", "give one of them"),
        ("interval --mtbf 3h --save 4s --slowdown 5%", "--slowdown without --persist slows nothing"),
        ("interval --mtbf 3h --save 4s --slowdown 100% --persist 9s", "from 0 to below 1"),
        ("interval --mtbf 3h --save 4s --min 2h --max 1h", "--min is above --max"),
        ("interval --mtbf 3h --save 4s --shape 0.7 --lognormal 1", "give one of them"),
        ("interval --mtbf 3h --save 4s --silent-mtbf 9d", "silent errors need both"),
        ("interval --mtbf 3h --save 4s --per-save-usd 1", "give --gpus or --nodes and --price"),
        ("interval --mtbf 3h --save 4s --gpus 0", "give a whole number of at least 1"),
        ("interval --mtbf 3h --save 4s --price nan --gpus 8", "nan is out of range: a number from 0 to"),
        (f"interval {TIERED} --notice-share 50%", "--tier with --notice-share is not modelled"),
        (f"interval {TIERED} --commit next-save", "--tier with --commit is not modelled"),
        (f"interval {TIERED} --shape 0.7", "--tier with --shape is not modelled"),
        (f"plan --gpus 64 {TIERED} --commit next-save", "--tier with --commit is not modelled"),
        ("interval --mtbf 3h --save 4s -o anon=true", "give --from URL"),
        ("interval --mtbf 3h --save 4s --svg /nonexistent/x.svg", "cannot be written: No such file"),
        ("plan --mtbf 3h --save 4s", "starts from a size"),
        ("plan --gpus 64 --save 4s --params 7B", "belong together"),
        ("plan --gpus 64 --save 4s --measured 64:1s", "two sizes"),
        ("plan --gpus 64 --save 4s --measured 64", "like 1024:9.8s"),
        ("plan --gpus 64 --save 4s --sizes 64", "like 1024:131072"),
        ("plan --gpus 16384 --save 60s --restart 15min --params 405B --tokens 15T --deadline 1d", "no number of nodes"),
        ("plan --gpus 64 --mtbf 9h --save 60s --params 7B --tokens 1T --deadline 0s", "--deadline is 0.0: give"),
        ("plan --gpus 64 --mtbf 9h --save 60s --params 7B --tokens 1T --mfu 0", "--mfu is 0.0: give"),
        ("plan --gpus 64 --mtbf 9h --save 60s --params 7B --tokens 1T --peak 0", "--peak is 0.0: give"),
        ("plan --gpus 64 --save 4s --params 7B --tokens 1T --checkpoint 0B", "--checkpoint is 0.0: give its size"),
        ("plan --gpus 64 --save 4s --person-hours -1", "-1 is out of range: a number from 0 to 10,000"),
        ("plan --gpus 64 --save 4s --person-usd inf", "inf is out of range: a number from 0 to 1,000,000"),
        ("plan --gpus 64 --save 4s --manual-share 300%", "--manual-share is 3.0: give the share"),
        ("interval --gpus 8 --save 4s --prior-failures 1e300", "1e300 is out of range: a number from 0.01 to 10,000"),
        ("interval --gpus 8 --save 4s --prior-failures 1e-300", "1e-300 is out of range"),
        ("interval --mtbf 1e-9s --save 4s --work 30d", "'1e-9s' is out of range: 1 µs (0.001ms) to 10,000 years"),
        ("interval --mtbf 3h --save 4s --work 1e300s", "'1e300s' is out of range"),
        ("interval --mtbf 1e200s --save 1e-200s", "'1e200s' is out of range"),
        ("interval --mtbf 3h --save 1e200s --work 30d", "'1e200s' is out of range"),
        ("interval --mtbf 3h --save 4s --shape 1e-300", "1e-300 is out of range: a number from 0.2 to 10 is accepted"),
        ("interval --mtbf 3h --save 4s --shape 1e300", "1e300 is out of range"),
        ("interval --mtbf 3h --save 4s --shape 100", "100 is out of range"),
        ("interval --mtbf 3h --save 4s --lognormal 1e300", "1e300 is out of range: a number from 0.05 to 3"),
        ("interval --mtbf 3h --save 4s --tier m:1e-9s:0s:80%", "'1e-9s' is out of range"),
        ("interval --mtbf 3h --save 4s --step 1s --current 9999999999999steps", "--current: '9999999999999.0s' is out"),
        ("interval --mtbf 3h --save 4s --notice-share 99999999/3", "counts like 9/3"),
        ("interval --mtbf 3h --bytes 1000PB --bandwidth 1B/s", "1 µs to 10,000 years are accepted"),
        ("plan --gpus 64 --save 4s --stall-exponent 1e300", "1e300 is out of range: a number from -3 to 3 is accepted"),
        ("plan --gpus 64 --save 4s --persist-exponent 300", "300 is out of range"),
        ("plan --gpus 64 --save 4s --sizes 1:1e300", "'1e300' is out of range: 1 to 1,000,000,000"),
        ("plan --gpus 64 --save 4s --measured 1e300:1s", "'1e300' is out of range"),
        ("nosuch", "No such command"),
    ],
)
def test_what_cannot_be_is_answered_by_a_sentence(line, sentence):
    result = run(line)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


EXTREME = ("0.001ms", "1s", "1h", "30d", "3652500d")
HARD = (  # each was once a crash, a loop without end or a sentence with nan
    "--mtbf 1s --save 1h --silent-mtbf 30d --verify 1min",
    "--mtbf 3652500d --save 10000w --silent-mtbf 5ms --verify 5ms",
    "--mtbf 3h --save 4s --step 1s --silent-mtbf 30d --verify 1min --work 30d",
    "--gpus 1000000000 --stall 1min --persist 30d --warmup 1h --work 3652500d --target-goodput 99.9999%",
    "--gpus 64 --rate 1e9/1000nd --stall 30d --persist 5ms --detect 30d --tier m:5ms:5ms:80%:1min --warmup 3652500d",
    "--mtbf 5d --save 1h --tier m:0.001ms:0.001ms:80%:5ms --work 3652500d --min 3652500d",
    "--failures 1000000 --exposure 1s --save 3652500d --work 3652500d --plot",
    "--mtbf 1s --save 30d --shape 0.2 --work 30d",
    "--mtbf 3652500d --save 0.001ms --lognormal 3 --plot",
)


@pytest.mark.parametrize("more", ["", "--work 30d --step 1s", "--work 3652500d --load 1h --gpus 64 --price 2"])
def test_no_answer_holds_a_number_that_is_none(more):
    """Nor does one take long: over all magnitudes that are accepted."""
    lines = [f"--mtbf {mtbf} --save {save} {more}" for mtbf in EXTREME for save in EXTREME]
    for line in [*lines, *(HARD if not more else ())]:
        start = time.process_time()
        result = run(f"interval {line}")
        assert result.exit_code == 0, (line, result.output)
        assert not re.search(r"\b(nan|inf)\b", result.stdout), (line, result.stdout)
        assert max(map(len, result.stdout.splitlines())) < 80, line
        assert time.process_time() - start < 2, line
        json.loads(run(f"interval {line} --json").stdout, parse_constant=pytest.fail)


@pytest.mark.parametrize("mtbf", EXTREME)
def test_nor_does_a_plan(mtbf):
    for save in EXTREME:
        result = run(f"plan --gpus 64 --mtbf {mtbf} --save {save} --params 7B --tokens 1T --price 2")
        assert result.exit_code == 0, result.output
        assert not re.search(r"\b(nan|inf)\b|-0%", result.stdout), result.stdout
        assert max(map(len, result.stdout.splitlines())) < 80
    falling = "--gpus 64 --rate 1e9/1000nd --stall 0.001ms --persist 1min --stall-exponent -3 --warmup 0.001ms"
    assert run(f"plan {falling}").exit_code == 0


def test_a_job_that_never_ends_is_told_in_a_sentence():
    for save in ("1h", "1min"):
        assert "The job never ends: in 10,000 years" in run(f"interval --mtbf 1s --save {save} --work 30d").stdout
    assert "Next to nothing is trained" in run(f"interval {HARD[0]}").stdout


def test_a_job_of_known_length_is_told_its_bill():
    text = " ".join(run(f"{CASES['interval_assumed']} --price 2.5").stdout.split())
    found = re.search(r"These are ([\d,]+) device-hours, \$([\d,]+); ([\d,]+) of them, \$([\d,]+), are lost", text)
    hours, usd, lost, lost_usd = (float(n.replace(",", "")) for n in found.groups())
    total = json.loads(run(f"{CASES['interval_assumed']} --json").stdout)["total_s"]["mean"] * 1024 / 3600
    assert (hours, lost) == pytest.approx((total, total - 30 * 24 * 1024), rel=5e-3)
    assert (usd, lost_usd) == pytest.approx((2.5 * hours, 2.5 * lost), rel=5e-3)


def test_what_gains_nothing_is_not_told_to_be_fixed():
    """A tier in memory for saves that cost nothing only adds a stall; blocking saves are the one warning."""
    hurt = "--mtbf 3h --stall 1s --persist 1h --load 1min --in-flight many --commit next-save"
    for line in (LLAMA, hurt, "--mtbf 10min --save 20min", "--mtbf 100d --save 1s --load 1s"):
        levers = json.loads(run(f"interval {line} --json").stdout)["levers"]
        assert all(lever["points"] > 0 for lever in levers if lever["name"] != "blocking"), line
    assert run(f"interval {LLAMA}").stdout.count("\n   -") == 1


def test_little_measured_is_said(tmp_path):
    for name in ("few", "one", "none"):
        (tmp_path / name).mkdir()
    few = [e for n in range(1, 4) for e in life(n, 1000.0 * n, *trained(n))]
    text = " ".join(run(f"interval --from {write(tmp_path / 'few', *few)}").stdout.split())
    assert "! Rests on only 2 failures measured." in text
    one = write(tmp_path / "one", *life(1, 0.0, *trained(1)))
    assert "! Rests on only 0 failures and 1 save measured." in " ".join(run(f"interval --from {one}").stdout.split())
    assert "! Rests on only 0 failures and 1 save measured." in " ".join(run(f"plan --from {one}").stdout.split())
    assert "Rests on only" not in run(f"interval --from {one} --mtbf 3h --save 4s").stdout
    assert "! Rests on only 1 save measured." in run(f"interval --from {one} --mtbf 3h").stdout
    none = run(f"interval --from {write(tmp_path / 'none', *life(1, 0.0, (9.0, 1, steps(1))))}")
    assert "makes its first save after at most 2 min" in " ".join(none.stderr.split())


def test_interval_json():
    result = json.loads(run(CASES["interval_llama3"] + " --json --target-goodput 95%").stdout)
    assert result["schema"] == "elastic.interval/1"
    assert result["steps"] == 27
    assert sum(result["waste"].values()) == pytest.approx(1, abs=1e-9)
    assert result["waste"]["useful"] == pytest.approx(result["goodput"], abs=1e-12)
    assert result["provenance"]["stall_s"] == "given"
    assert result["levers"][0]["name"] == "failures"
    assert result["inputs"]["costs"] == {
        "stall_s": 5.0,
        "persist_s": 120.0,
        "detect_s": 240.0,
        "reschedule_s": 60.0,
        "load_s": 600.0,
    }
    assert {r["field"]: r["needed_s"] is None for r in result["target"]["reached_by"]}["mtbf_s"] is False
    assumed = json.loads(run("interval --nodes 16 --save 40s --json").stdout)
    assert assumed["provenance"]["rate"] == "assumed"


def test_plan_json_and_page(tmp_path):
    page = tmp_path / "wall.html"
    result = json.loads(run(f"{CASES['plan_deadline']} --json --html {page}").stdout)
    assert result["schema"] == "elastic.plan/1"
    assert result["deadline"]["wall_s"] <= 60 * 86_400
    assert result["sensible_devices"] < result["wall_devices"]
    html = page.read_text(encoding="utf-8")
    assert html.count("<polyline") == 8
    assert "http" not in html.replace("doctype html", "")


def test_interval_picture(tmp_path):
    svg, html = tmp_path / "interval.svg", tmp_path / "interval.html"
    line = f"interval --failures 3 --exposure 24h --save 40s --step 3s --current 2000steps --svg {svg} --html {html}"
    result = run(line)
    assert (result.exit_code, result.stderr) == (0, f"wrote {svg}\nwrote {html}\n")
    picture, page = svg.read_text(encoding="utf-8"), html.read_text(encoding="utf-8")
    root = ET.fromstring(picture)
    texts = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("}text")]
    for name in ("best: 23 min", "Young: 23.4 min", "Daly: 23 min", "in use: 100 min"):
        assert [t for t in texts if t.startswith(name)], name
    band = next(e for e in root.iter() if e.tag.endswith("}polygon"))
    curve = next(e for e in root.iter() if e.tag.endswith("}polyline"))
    ys = [float(p.split(",")[1]) for p in curve.get("points").split()]
    assert abs(ys.index(min(ys)) - len(ys) // 2) <= 3  # the best interval is in the middle, and as high as any
    assert len(band.get("points").split()) == 2 * len(ys)
    assert picture.strip() in page
    for text in (picture.replace('xmlns="http://www.w3.org/2000/svg"', ""), page.replace("http://www.w3.org", "")):
        assert not re.search(r"https?:|src=|<script|<link|@import|url\(", text)
    known = tmp_path / "known.svg"
    assert run(f"interval --mtbf 6h --save 40s --svg {known}").exit_code == 0
    assert "polygon" not in known.read_text()


def test_published_walls():
    """Llama 3's rate: 60 s blocking, 15 min outage: 40k / 177k GPUs; 2 s, 1 min upload, 3 min outage: 205k / 746k."""
    slow = json.loads(
        run("plan --gpus 16384 --mtbf 11135.08353221957s --save 60s --reschedule 5min --load 10min --json").stdout
    )
    fast_costs = "--stall 2s --persist 1min --in-flight many --reschedule 1min --load 2min"
    fast = json.loads(run(f"plan --gpus 16384 --mtbf 11135.08353221957s {fast_costs} --json").stdout)
    assert (slow["sensible_devices"], slow["wall_devices"]) == pytest.approx((40_275, 177_138), rel=1e-3)
    assert (fast["sensible_devices"], fast["wall_devices"]) == pytest.approx((205_464, 746_160), rel=1e-3)


@pytest.mark.parametrize("module", ["elastic.cli", "elastic.economics.interval", "elastic.economics.pacer"])
def test_imports_stay_light(module):
    code = f"import sys, {module}; bad = {{'torch', 'numpy', 'scipy', 'rich'}} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_commands_run_without_numpy_and_help_imports_none_of_them():
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom elastic.cli import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0\n"
        "assert not [m for m in sys.modules if m.startswith('elastic.commands')]\n"
        "assert CliRunner().invoke(cli, ['interval', '--mtbf', '6h', '--save', '40s', '--plot']).exit_code == 0\n"
        "assert CliRunner().invoke(cli, ['plan', '--gpus', '64', '--save', '40s']).exit_code == 0\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_command_in_the_table_can_be_loaded():
    for name in COMMANDS:
        assert run(f"{name} --help").exit_code == 0


def test_a_bug_ends_with_70_and_a_known_error_with_its_own_status(monkeypatch):
    import elastic.economics.interval as home

    class Refused(Exception):
        exit_status = 5

    def broken(*_):
        raise failure

    monkeypatch.setattr(home, "recommend", broken)
    failure = ZeroDivisionError("x")
    result = run("interval --mtbf 6h --save 40s")
    assert (result.exit_code, "This is a bug" in result.stderr) == (70, True)
    failure = Refused("the store said no")
    result = run("interval --mtbf 6h --save 40s")
    assert (result.exit_code, result.stderr.strip()) == (5, "the store said no")

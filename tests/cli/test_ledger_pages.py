"""The pages of ``elastic goodput`` and ``elastic compare`` in a real browser: drawn, legible, light and dark, alone.

Skipped aloud where no Chromium is installed.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.cli import cli
from tests.bench.ledger_report import write
from tests.unit.elastic.ledgers import Job, Written
from tests.unit.elastic.test_compare import decay, told

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the pages were not looked at in a browser")

LOOK = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const shown = [...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width > 0);
const name = s => s.getAttribute('aria-label');
const words = shown.flatMap(s => [...s.querySelectorAll('text')].map(t => [name(s), t.textContent, ...box(t)]));
document.title = 'SEEN' + JSON.stringify({
  pictures: shown.map(s => [s.getAttribute('aria-label'), ...box(s)]), words,
  fill: [...new Set([...document.querySelectorAll('rect')].map(r => getComputedStyle(r).fill))],
  dark: matchMedia('(prefers-color-scheme: dark)').matches,
  paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
  wide: document.documentElement.scrollWidth, view: innerWidth,
  fetched: performance.getEntriesByType('resource').map(e => e.name),
}) + 'END';
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("pages")
    write(home / "run", Written(Job(world=4, cpu=(0.3, 0.3, 0.42, 0.3), kills=((33, 1), (61, 0)), jitter=0.1)).events)
    for name, world, steps in (("one", 1, 50), ("two", 2, 28), ("four", 4, 60)):
        write(home / name, told(Written(Job(world=world, steps=200, body=1.0)).events, "val_loss", decay(steps)))
    runs = " ".join(str(home / name) for name in ("one", "two", "four"))
    for line in (
        f"goodput {home / 'run'} --html {home / 'goodput.html'}",
        f"compare {runs} --html {home / 'compare.html'}",
    ):
        assert CliRunner().invoke(cli, line.split()).exit_code == 0
    return home


@pytest.fixture(scope="module")
def refused() -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that lets nothing through, and what it was asked for."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    asked.append(peer.recv(4096).split(b"\r\n")[0])

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], asked


def look(page: Path, tmp_path: Path, *, width: int, dark: bool, proxy: int) -> dict[str, Any]:
    """What a browser makes of a page: a copy of it tells, in its title."""
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text().replace("</body>", f"{LOOK}</body>"))
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
        f"--user-data-dir={tmp_path / 'profile'}", f"--proxy-server=127.0.0.1:{proxy}", "--hide-scrollbars",
        f"--window-size={width},1200", f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom", copy.as_uri(),
    ]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"<title>SEEN(.*?)END</title>", answer.stdout, re.DOTALL)
    assert found is not None, answer.stderr[-2000:] + answer.stdout[:500]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert len(seen["words"]) > 10
    return seen


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize(("name", "pictures"), [("goodput", 4), ("compare", 2)])
def test_it_is_drawn_and_legible(
    name: str, pictures: int, width: int, dark: bool, pages: Path, tmp_path: Path, refused: tuple[int, list[bytes]]
) -> None:
    seen = look(pages / f"{name}.html", tmp_path, width=width, dark=dark, proxy=refused[0])
    assert len(seen["pictures"]) == pictures
    assert seen["wide"] <= seen["view"]  # nothing to scroll sideways
    assert seen["dark"] is dark
    paper, ink = (sum(map(int, re.findall(r"\d+", seen[k])[:3])) for k in ("paper", "ink"))
    assert (paper < 150 < ink) if dark else (ink < 150 < 600 < paper)
    assert "rgb(0, 0, 0)" not in seen["fill"]  # a box without a style of its own
    edges = {label: (left, right) for label, left, _, right, _ in seen["pictures"]}
    for label, words, left, top, right, bottom in seen["words"]:
        low, high = edges[label]
        assert low - 1 <= left, (label, words, "cut off at the left", left, low)
        assert right <= high + 1, (label, words, "cut off at the right", right, high)
        assert bottom - top > 7, (label, words)
    for n, (label, words, *a) in enumerate(seen["words"]):
        for other, more, *b in seen["words"][n + 1 :]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] - 4 <= b[1] or b[3] - 4 <= a[1]
            assert label != other or apart, (label, words, more, "overlap")


def test_it_asks_for_nothing(pages: Path, tmp_path: Path, refused: tuple[int, list[bytes]]) -> None:
    seen = look(pages / "goodput.html", tmp_path, width=1000, dark=False, proxy=refused[0])
    assert seen["fetched"] == []
    assert [line for line in refused[1] if b"google" not in line and b"gvt1" not in line] == []  # the browser's own

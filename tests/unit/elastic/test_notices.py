"""What asks a run to stop besides signals, up to a real HTTP server."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ckpt.errors import Refused
from elastic.notices import NoticeUrl, StopFile, TimeLimit


def within(seconds: float, true: object) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def test_a_file(tmp_path: Path) -> None:
    notice = StopFile(tmp_path / "stop")
    notice.open()
    assert notice.asked() is None
    (tmp_path / "stop").touch()
    assert within(2, notice.asked)
    asked = notice.asked()
    assert asked is not None
    assert str(tmp_path / "stop") in asked.source
    with pytest.raises(Refused, match="is there already"):
        StopFile(tmp_path / "stop").open()


def test_a_time_limit_counts_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    age = time.time() - psutil.Process().create_time()
    near = TimeLimit(age + 100.4, before=100.0)
    assert near.asked() is None
    assert within(2, near.asked)
    asked = near.asked()
    assert asked is not None
    assert asked.within_s is not None
    assert 95 < asked.within_s <= 100
    with pytest.raises(Refused, match="no time is left") as caught:
        near.open()
    assert "a smaller before=" in (caught.value.hint or "")


def test_under_torchrun_it_counts_from_the_start_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    parent = psutil.Process().parent()
    assert parent is not None
    limit = TimeLimit("100d", before="1s")
    assert limit._end == pytest.approx(parent.create_time() + 8_640_000, abs=1)


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(Refused, match="SLURM_JOB_END_TIME"):
        TimeLimit.slurm()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    assert TimeLimit.slurm(before="1m").asked() is None
    asked = TimeLimit.slurm(before="2m").asked()
    assert asked is not None
    assert "Slurm" in asked.source


@pytest.mark.parametrize(("limit", "before"), [("20s", "2m"), (20.0, 20.0)])
def test_a_limit_without_room_is_refused(limit: str | float, before: str | float) -> None:
    with pytest.raises(Refused, match="leaves nothing") as caught:
        TimeLimit(limit, before=before)
    assert (caught.value.hint or "").startswith('TimeLimit("20s", before="5s")')
    TimeLimit("20s", before="5s")


@pytest.fixture
def cloud() -> Iterator[http.server.ThreadingHTTPServer]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.server.seen.append(self.headers["Metadata-Flavor"])  # type: ignore[attr-defined]
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.end_headers()
            self.wfile.write(self.server.text)  # type: ignore[attr-defined]

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.status, server.text, server.seen = 404, b"", []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_notice_at_a_url(cloud: http.server.ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{cloud.server_port}/preempted"
    notice = NoticeUrl(url, within_s=30, every_s=0.02, body="TRUE", headers={"Metadata-Flavor": "Google"})
    notice.open()
    try:
        assert within(5, lambda: len(cloud.seen) >= 2)  # type: ignore[attr-defined]
        assert notice.asked() is None
        cloud.status, cloud.text = 200, b"FALSE"  # type: ignore[attr-defined]
        time.sleep(0.1)
        assert notice.asked() is None
        cloud.text = b"TRUE"  # type: ignore[attr-defined]
        assert within(5, notice.asked)
        asked = notice.asked()
        assert asked is not None
        assert asked.within_s is not None
        assert 25 < asked.within_s <= 30
        assert set(cloud.seen) == {"Google"}  # type: ignore[attr-defined]
    finally:
        notice.close()


def test_a_url_where_nobody_answers_never_asks() -> None:
    notice = NoticeUrl("http://127.0.0.1:9/", every_s=0.02)
    notice.open()
    time.sleep(0.2)
    assert notice.asked() is None
    notice.close()
    with pytest.raises(Refused, match="http URL"):
        NoticeUrl("file:///etc/passwd")

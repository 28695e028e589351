"""A worker before its script and after it: to the script it is ``python script.py arguments``, with lines flushed."""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
import traceback
import types
from typing import NoReturn

from elastic.launch import beats, prctl
from elastic.launch.forkserver import WORKER_VARIABLE
from elastic.launch.task import MODULE, Task

DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Tells a worker to write the stacks of all its threads; works while the interpreter lock is held."""


def main() -> None:
    """In a fresh interpreter: run the task that the environment holds."""
    run(Task.from_json(os.environ.pop(WORKER_VARIABLE)))


def run(task: Task) -> NoReturn:
    """Run the script to its end; ends the process as the script ends."""
    os.environ.clear()
    os.environ.update(task.env)
    prctl.call_itself(f"rank{task.env.get('RANK', task.local_rank)} {os.path.basename(task.argv[0])}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _reseed()
    if task.stacks_fd >= 0:
        faulthandler.register(DUMP_SIGNAL, file=task.stacks_fd, all_threads=True, chain=False)
    if task.beats_fd >= 0:
        beats.attach(task.beats_fd, task.local_rank)
    try:
        _run_script(task)
    except Exception as error:
        _last_words(task, error)
        raise SystemExit(1) from None
    raise SystemExit(0)


def _run_script(task: Task) -> None:
    path, *_ = sys.argv = list(task.argv)
    if task.kind == MODULE:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(path, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = module  # stays: pickles and handlers at exit look into it
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"can't open file {path!r}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _last_words(task: Task, error: Exception) -> None:
    """What the interpreter does with an exception that nobody caught, less our frames; and a word to the launcher."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
    if task.words_fd >= 0:
        last = traceback.extract_tb(trace)[-1] if trace else None
        words = {
            "error": type(error).__qualname__,
            "message": str(error)[:2000],
            "where": f"{last.filename}:{last.lineno}" if last else None,
        }
        os.pwrite(task.words_fd, json.dumps(words).encode(), 0)


def _reseed() -> None:
    """A forked process has its parent's random numbers; Python's own are seeded anew by Python."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main()

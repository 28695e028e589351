"""An account in Prometheus' text format, for node_exporter's textfile collector: no port, no library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic.commands.ledger.show_goodput import QUANTILES, Told
from elastic.ledger.events import SaveCommitted
from elastic.ledger.goodput import PRODUCTIVE


def exposition(told: Told) -> str:
    """The whole file; what is not known is left out, as a missing series says more than a zero."""
    a, r, run = told.account, told.rates, {"run": told.url}
    saves = [(at, step) for p in a.parts for at, step, _ in p.attempt.lead.of(SaveCommitted)]
    ends = [p.end for p in a.parts]
    restarts = {how: sum(e.how == how for e in ends[:-1]) for how in sorted({e.how for e in ends[:-1]})}
    lost = {c: s for c, s in a.seconds.items() if c not in PRODUCTIVE}
    out = [
        _family("elastic_goodput_ratio", "gauge", "Share of the wall time that was productive.", [(run, a.goodput)]),
        _family("elastic_availability_ratio", "gauge", "Share of the wall time in which a process trained.",
                [(run, a.availability)]),
        _family("elastic_wall_seconds_total", "counter", "Wall time since the first start.", [(run, a.wall_s)]),
        _family("elastic_productive_seconds_total", "counter", "Wall time of steps that count and of evaluations.",
                [(run, sum(a.seconds[c] for c in PRODUCTIVE))]),
        _family("elastic_lost_seconds_total", "counter", "Wall time that was not productive, by cause.",
                [({**run, "cause": c}, s) for c, s in lost.items()]),
        _family("elastic_restarts_total", "counter", "Starts that another one followed, by how they ended.",
                [({**run, "reason": how}, n) for how, n in restarts.items()]),
        _family("elastic_steps_total", "counter", "Completed steps that count.", [(run, a.steps)]),
        _family("elastic_devices", "gauge", "World size of the newest start.", [(run, r.world)]),
        _family("elastic_running", "gauge", "1 while the newest start has not said that it ended.",
                [(run, float(a.running))]),
        _family("elastic_last_event_timestamp_seconds", "gauge", "When the ledger was last written.",
                [(run, a.parts[-1].attempt.last)]),
        _family("ckpt_last_durable_step", "gauge", "Newest step whose save was committed.",
                [(run, saves[-1][1])] if saves else []),
        _family("ckpt_last_durable_timestamp_seconds", "gauge", "When it was committed.",
                [(run, saves[-1][0])] if saves else []),
        _family("elastic_step_seconds", "gauge", "Quantiles of whole steps, by rank.",
                [({**run, "rank": str(x.rank), "quantile": f"{q:g}"}, x.times.at(q))
                 for x in r.ranks for q in QUANTILES]),
        _family("elastic_energy_joules_total", "counter", "Energy of the hosts that could be read.",
                [(run, r.energy_j)]),
        *(_family(f"elastic_{name}_total", "counter", f"{name.capitalize()} of steps that count.", [(run, c.useful)])
          for name, c in r.counted.items()),
        *(_family(f"elastic_{name}_per_second", "gauge", f"{name.capitalize()} a second while training.",
                  [(run, c.speed)]) for name, c in r.counted.items()),
    ]  # fmt: skip
    return "".join(out)


def _family(name: str, kind: str, what: str, samples: Iterable[tuple[Mapping[str, str], float | None]]) -> str:
    lines = [f"{name}{{{_labels(labels)}}} {float(value)!r}" for labels, value in samples if value is not None]
    return "\n".join([f"# HELP {name} {what}", f"# TYPE {name} {kind}", *lines]) + "\n" if lines else ""


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""``drills list``, ``drills describe``, ``drills heal``: what there is, what it does, what a dead one has left."""

from __future__ import annotations

import json

import click


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="JSON, schema drills.list/1.")
def list_(as_json: bool) -> None:
    """List the drills of the book.

    \b
    Exit status: 0 good.
    """
    from drills.book import BOOK

    if as_json:
        rows = [{"name": s.name, "summary": s.summary, "reaction": s.reaction, "needs": s.needs or "any storage",
                 "meant_to_fail": bool(s.meant_to_fail)} for s in BOOK.values()]  # fmt: skip
        click.echo(json.dumps({"schema": "drills.list/1", "drills": rows}, indent=1))
        return
    width = max(map(len, BOOK))
    for s in BOOK.values():
        click.echo(f"{s.name:<{width}}  {s.summary}")


@click.command()
@click.argument("name")
@click.option("--toml", "as_toml", is_flag=True, help="As TOML, to change and run: drills run FILE.toml.")
def describe(name: str, as_toml: bool) -> None:
    """Describe a drill: what it does, when, and what it is judged by. NAME may be a file, FILE.toml.

    \b
    Example:
      drills describe kill-in-commit --toml > mine.toml

    \b
    Exit status: 0 good · 2 there is no such drill, or the file is none.
    """
    from drills.book import find
    from drills.checks import CHECKS, asked
    from drills.scenario import REACTIONS
    from drills.target import EXAMPLE

    s = find(name)
    if as_toml:
        from drills.toml import dumps

        click.echo(dumps(s), nl=False)
        return
    t = s.targets
    click.echo(f"{'does':<14}{s.summary}\n{'proves':<14}{s.proves}")
    for n, strike in enumerate(s.strikes, 1):
        ends = ", healed once the job that was started again has committed" if strike.until_back else ""
        if strike.for_s is not None:
            ends = f", healed after {strike.for_s:g} s"
        when = "when the job restores" if strike.fault.by_itself else strike.when.said()
        click.echo(f"{f'strike {n}':<14}{strike.fault.name}: {when}{ends}")
    facts = [
        ("expects", REACTIONS[s.reaction]),
        ("storage", s.needs or "any"),
        ("targets", f"noticed {t.detect_s:g} s, restarted {t.restart_s:g} s, first new step {t.first_step_s:g} s"),
        *([("meant to fail", s.meant_to_fail)] if s.meant_to_fail else []),
    ]
    for label, text in facts:
        click.echo(f"{label:<14}{text}")
    click.echo("checks")
    for check in asked(s):
        click.echo(f"  {check:<22}{(CHECKS[check].__doc__ or '').splitlines()[0]}")
    click.echo(f"{'example':<14}{EXAMPLE.replace('kill-any-rank', name)}")


@click.command()
def heal() -> None:
    """Undo what drills have left that were themselves killed; every ``drills run`` begins with it.

    \b
    Exit status: 0 good, whether there was anything to undo or not.
    """
    from drills.leftovers import heal as undo

    for said in undo() or ["nothing was left"]:
        click.echo(said)

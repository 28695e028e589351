"""The command ``store``."""

from __future__ import annotations

import click


@click.command("store", short_help="Hold the store where the hosts of a job meet, on a machine that is none of them.")
@click.option("--host", default="0.0.0.0", metavar="ADDRESS", help="To listen on; default all.")
@click.option("--port", default=29400, type=click.IntRange(0, 65535), help="Default 29400; 0 takes a free one.")
def command(host: str, port: int) -> None:
    """Hold the store where the hosts of a job meet, until it is ended; the port is the line that it prints.

    With the store on a machine that trains, the job ends with that machine. Start this anywhere else, one for any
    number of jobs, and let each host say

    \b
      elastic launch --rdzv-endpoint THIS:29400 --rdzv-conf is_host=0 --rdzv-id JOB …

    \b
    Exit status: 0 ended on request · 2 usage.
    """
    from elastic.launch.torchelastic import hold_store

    hold_store(host, port, told=lambda n: click.echo(str(n)))

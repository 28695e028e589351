"""The command ``doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import click

from ckpt.catalog import Catalog
from ckpt.errors import CkptError
from ckpt.store import open_store
from ckpt.store.contract import Store
from ckpt.store.local import LocalStore
from ckpt.tools import render
from ckpt.tools.doctor import bucket, install, requests, storage
from ckpt.tools.doctor.finding import Checked, worst
from ckpt.tools.options import STATUSES, Settings, common
from ckpt.tools.target import Address

RETRY_BUDGET_S = 10.0  # a doctor is asked by somebody who waits


@click.command(epilog=STATUSES)
@click.argument("url", required=False)
@click.option("--price-per-1000-put", "price", type=click.FloatRange(min=0), metavar="MONEY",
              help="What 1,000 PUT, POST or LIST requests cost, to tell the cost of a save.")  # fmt: skip
@common
@click.pass_obj
def doctor(
    settings: Settings, url: str | None, price: float | None, client: str | None, options: dict[str, Any]
) -> int:
    """Check this installation; or, with URL, the storage there.

    With URL each operation that a run needs is tried in a throw-away place below it, which is cleaned up. Besides:
    the smallest set of permissions, what the bucket says of encryption, versioning and lifecycle rules, and what a
    save costs in requests. What cannot be asked is not verified.

    \b
    Examples:  ckpt doctor
               ckpt doctor s3://bucket/run42 --price-per-1000-put 0.005
    """
    if url is None:
        return _install(settings)
    address = Address.parse(url, client=client, options=options)
    if address.step is not None:
        address = replace(address, url=url, step=None)
    store = open_store(address.url, client=client, **_hasty(address))
    with storage.as_it_was(store):
        checks = list(_look(store, address))
    scheme, _, place = store.url.partition("://")
    allowed = requests.permissions(scheme, place)
    cost = None if isinstance(store, LocalStore) else _cost(store)
    money = None if cost is None or price is None else (cost.writes + cost.lists) / 1000 * price
    if settings.json:
        print(render.as_json("ckpt.doctor/1", {
            "url": store.url, "verdict": worst(checks), "checks": checks, "permissions": list(allowed),
            "requests_per_save": cost and {**asdict(cost), "formula": cost.formula}, "cost_per_save": money,
        }))  # fmt: skip
    else:
        _print(checks)
        render.print_lines(["", "permissions", *(f"  {line}" for line in allowed)])
        if isinstance(store, LocalStore):
            return 5 if worst(checks) == "bad" else 0
        render.print_lines(["", "requests of a save"])
        if cost is None:
            empty = requests.of_save(1, ())
            render.print_lines(["  not verified: there is no step yet to count", f"  {empty.formula}"])
        else:
            paid = "" if money is None else f", {money:.6f} at {price:g} a thousand"
            render.print_lines([
                f"  {cost.writes} writes and {cost.lists} lists{paid} (like the newest step: "
                f"{render.plural(cost.objects, 'object')} of {render.plural(cost.ranks, 'rank')})", f"  {cost.formula}",
            ])  # fmt: skip
    return 5 if worst(checks) == "bad" else 0


def _install(settings: Settings) -> int:
    checks = install.look()
    if settings.json:
        print(render.as_json("ckpt.doctor/1", {"url": None, "verdict": worst(checks), "checks": checks}))
    else:
        _print(checks)
    return 1 if worst(checks) == "bad" else 0


def _hasty(address: Address) -> dict[str, Any]:
    scheme = address.url.partition("://")[0] if "://" in address.url else "file"
    return {**({} if scheme in ("file", "memory") else {"retry_budget_s": RETRY_BUDGET_S}), **address.options}


def _look(store: Store, address: Address) -> Iterator[Checked]:
    yield from storage.try_operations(store)
    scheme, _, place = store.url.partition("://")
    if isinstance(store, LocalStore):
        yield from storage.look_at_disk(store)
        yield storage.fsync_rate(store)
    elif scheme in ("s3", "s3a"):
        name, _, prefix = place.partition("/")
        yield from bucket.ask(name, prefix, address.options)
    else:
        yield from (Checked(q, "not verified", f"no client here asks a {scheme}:// storage") for q in bucket.QUESTIONS)


def _cost(store: Store) -> requests.Requests | None:
    """What a save like the newest step's costs; None where there is none, or it cannot be read."""
    try:
        catalog = Catalog(store)
        usable = catalog.usable(catalog.listing())
        manifest = catalog.candidate(usable[0]).manifest if usable else None
    except CkptError:
        return None
    return None if manifest is None else requests.of_save(manifest.world_size, [o.bytes for o in manifest.objects])


def _print(checks: list[Checked]) -> None:
    width = max(len(c.name) for c in checks)
    for c in checks:
        render.print_lines([render.safe(f"{c.verdict:<12}  {c.name:<{width}}  {c.what}")])
        if c.fix is not None:
            render.print_lines([render.safe(f"{'':<12}  {'':<{width}}  fix: {c.fix}")])

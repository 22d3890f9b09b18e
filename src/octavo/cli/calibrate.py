"""`octavo bench calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.show import notice
from octavo.config import EngineConfig, Environment


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, directory or hub id.")],
    dtype: Annotated[str, typer.Option(help="Compute type.")] = "auto",
    kv_cache_memory: Annotated[str, typer.Option(metavar="SIZE", help="Size of the cache.")] = "1GiB",
    num_threads: Annotated[
        int | None, typer.Option(help="Threads that compute.", show_default="the processors there are")
    ] = None,
) -> None:
    """Time steps of many shapes, so that octavo simulate --hardware this knows how long they take here.

    Takes a minute or more; leave the machine alone meanwhile.
    """
    from octavo.engine import Engine
    from octavo.plan.facts import find_model
    from octavo.simulate.calibrate import calibrate as measure
    from octavo.simulate.fitted import Measured, save

    options = {"dtype": dtype, "kv_cache_memory": kv_cache_memory, "num_threads": num_threads}
    facts = find_model(model)
    engine = Engine(EngineConfig.create(model, enable_prefix_caching=False, **options), notice=notice)
    measured = Measured(facts, engine.layout.compute, engine.num_threads)
    print(save(measure(engine), Environment.read().home, measured))

"""Plays worlds from a seed on, and says what was seen or where it went wrong."""

from __future__ import annotations

import logging
import time

import click

from emberkv.testing.fault_simulator.run import SimulationError, simulate


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first world.")
@click.option("--steps", type=int, default=200_000, show_default=True, help="In all worlds.")
def main(seed: int, steps: int) -> None:
    """Run the fault simulator; a failure ends it with the seed and step that show it again."""
    logging.disable(logging.CRITICAL)  # faults are what is wanted here
    began_s = time.perf_counter()
    try:
        report = simulate(seed, steps)
    except SimulationError as error:
        raise click.ClickException(str(error)) from error
    took_s = time.perf_counter() - began_s
    click.echo(f"{report.steps} steps in {report.worlds} worlds, {steps / took_s:.0f} a second")
    click.echo(f"{report.loaded_chunks} chunks loaded, all of them right")
    for what, count in sorted(report.seen.counts.items(), key=lambda each: str(each[0])):
        click.echo(f"  {what} {count}")
    click.echo(f"digest {report.digest}")


if __name__ == "__main__":
    main()

"""`hvd report`: a page of benchmark files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hvd.cli.console import note
from hvd.errors import ConfigError


@click.command()
@click.argument("files", metavar="BENCH.json...", nargs=-1, required=True)
@click.option("--html", metavar="OUT", type=click.Path(path_type=Path), help="Where to write it (BENCH.html).")
@click.option("--title", default="", show_default=False, help="Heading of the page (default: the models' names).")
@click.option("--overwrite", is_flag=True, help="Replace what --html OUT holds already.")
def report(files: tuple[str, ...], html: Path | None, title: str, overwrite: bool) -> None:
    """Make one page of one or more files of 'hvd bench --json'.

    Tables that can be sorted, plots, every request to be opened; of several files also how the models compare, set by
    set. The page is one file, asks the network for nothing, and can be read on a phone and in the dark.

    \b
    Examples:
      hvd report results.json
      hvd report smollm2.json qwen.json --html models.html --title "Two small models"
    """
    out = html or Path(files[0]).with_suffix(".html")
    if out.exists() and not overwrite:
        raise ConfigError(f"{out} exists already; --overwrite replaces it, --html names another")
    from hvd.bench.file import read_bench

    contents = [read_bench(file) for file in files]
    for file, content in zip(files, contents, strict=True):
        if not content["records"]:
            raise ConfigError(f"{file} holds no records; let 'hvd bench' measure at least one prompt")
    try:
        write_report(contents, out, title)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{', '.join(files)}: no complete files of 'hvd bench --json' ({error!r})") from error


def write_report(contents: Sequence[Mapping[str, Any]], out: Path, title: str = "") -> None:
    """Write the page of benchmark files as `read_bench` gives them. ConfigError when the disk refuses."""
    from hvd.bench.matrix import matrix
    from hvd.report.bench_page import bench_page
    from hvd.report.page import write_page

    write_page(out, bench_page(contents, matrix(contents), title))
    note(f"wrote {out}")

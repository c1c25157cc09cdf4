#!/usr/bin/env python3
"""Writes docs/cli.md from the commands' own --help.   usage: make_cli_docs.py [--check]"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from hvd.cli.main import hvd

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
WIDTH = 100
HEAD = """# Command line

Generated from `--help` by `scripts/make_cli_docs.py`; do not edit.

Results go to stdout, everything else to stderr; progress bars show only where stderr is a terminal. Exit codes: 0 done;
1 a fault of the program (`HVD_DEBUG=1` shows where), or outputs that differ in `hvd bench`; 2 the request can't be
served as it is, one line says why; 130 interrupted.
"""


def render() -> str:
    """The whole page."""
    sections = [f"## {path}\n\n```text\n{text}\n```\n" for path, text in helps(hvd, "hvd", None)]
    return "\n".join([HEAD, *sections])


def helps(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    """(command path, help text) of a command and those below it, hidden ones left out."""
    settings = {**command.context_settings, "terminal_width": WIDTH}
    with click.Context(command, info_name=name, parent=parent, **settings) as context:
        yield context.command_path, command.get_help(context).rstrip()
        if isinstance(command, click.Group):
            for below in command.list_commands(context):
                child = command.get_command(context, below)
                if child is not None and not child.hidden:
                    yield from helps(child, below, context)


def main() -> int:
    """Write the page, or with --check only compare."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(render(), "utf-8")
        return 0
    if PAGE.read_text("utf-8") == render():
        return 0
    print(f"{PAGE} is not what --help says; run scripts/make_cli_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

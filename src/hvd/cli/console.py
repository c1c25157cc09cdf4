"""What people see: progress and notes on stderr, results on stdout and nothing else there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

WIDE, NARROW = 160, 80

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total)."""


def stderr_console() -> Console:
    """A Rich console on stderr; plain text when stderr is no terminal or NO_COLOR is set."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def stdout_console(width: int = WIDE) -> Console:
    """A Rich console for tables that are a command's result.

    width   where stdout is no terminal and the variable COLUMNS gives none
    """
    from rich.console import Console

    console = Console(highlight=False)
    columns = os.environ.get("COLUMNS", "")
    return console if console.is_terminal or columns.isdecimal() else Console(highlight=False, width=width)


def note(text: str) -> None:
    """One line for people."""
    click.echo(text, err=True)


def emit_json(value: Mapping[str, object]) -> None:
    """The result of a command, as one line of JSON on stdout."""
    click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, gone when done; nothing at all when stderr is no terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        task = bars.add_task("", total=None, visible=False)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total, visible=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr, gone when done; nothing when stderr is no terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def read_text(path: str) -> str:
    """A text file, or stdin for "-". Raises ConfigError in one line when it can't be read."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"can't read the prompt file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt file {path} is not UTF-8 text (byte {error.start})") from error

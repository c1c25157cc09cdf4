"""`hvd`: the commands together, and the edge where errors become one clear line.

Exit codes: 0 done; 1 a fault of this program; 2 the request can't be served as it is (options, files, model, prompt);
130 interrupted.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import click

from hvd import __version__
from hvd.cli.analyze import analyze
from hvd.cli.bench import bench
from hvd.cli.convert import convert
from hvd.cli.demo import demo
from hvd.cli.explain import explain
from hvd.cli.generate import generate
from hvd.cli.profile import profile
from hvd.cli.replay import replay
from hvd.cli.report import report
from hvd.cli.trace import trace
from hvd.cli.train import train
from hvd.errors import HVDError

FAULT, REFUSED, INTERRUPTED = 1, 2, 130


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
)
@click.version_option(__version__, message="hvd %(version)s")
@click.pass_context
def hvd(context: click.Context) -> None:
    """Hybrid Verified Decoding: lossless speculative decoding that knows, before verifying, whether a draft will pay.

    Results go to stdout, everything else to stderr. Exit code 2 means that a request can't be served as it is.

    \b
    Examples:
      hvd generate "Why is the sky blue?" --model SmolLM2-135M-Instruct.Q4_1.gguf
      hvd bench --model MODEL --data prompts.jsonl --policies match-len,hvd
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (generate, explain, convert, profile, trace, train, replay, analyze, bench, report, demo):
    hvd.add_command(_command)


def run() -> NoReturn:
    """Entry point of the `hvd` program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a letter is no reason to fail
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    try:
        with _stopped_like_ctrl_c(), hvd.make_context("hvd", list(arguments)) as context:
            hvd.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as end:  # --help, --version, or a command that says so
        return end.exit_code
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        return _say(error.format_message() + _where_help_is(error), REFUSED)
    except HVDError as error:
        return _say(str(error), REFUSED)
    except BrokenPipeError:
        return _quiet()
    except OSError as error:
        return _say(f"{error.filename or 'output'}: {error.strerror or error}", REFUSED)
    except Exception as error:  # noqa: BLE001 - the edge of the program
        hint = "" if _debug() else " (set HVD_DEBUG=1 to see where; please report it)"
        return _say(f"unexpected {type(error).__name__}: {error}{hint}", FAULT)


@contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP end a command as Ctrl-C does: it saves what it has and leaves nothing running."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [getattr(signal, name) for name in names if threading.current_thread() is threading.main_thread()]
    ours = [number for number in ours if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _say(message: str, code: int) -> int:
    """One line on stderr; in front of it the traceback when HVD_DEBUG is set."""
    if _debug() and code != INTERRUPTED:
        traceback.print_exc()
    click.echo("hvd: " + " ".join(message.split()), err=True)
    return code


def _where_help_is(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f" (see '{context.command_path} --help')" if context is not None else ""


def _debug() -> bool:
    return os.environ.get("HVD_DEBUG", "") not in ("", "0")


def _quiet() -> int:
    """The reader of our output has gone: nothing to say, and nothing to flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAULT


if __name__ == "__main__":
    run()

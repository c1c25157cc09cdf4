"""The prompt of a command: an argument, a file or a pipe; as a chat message or as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hvd.cli.console import read_text
from hvd.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hvd.engine.llm import LLM

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.argument("prompt", required=False),
    click.option(
        "--file", "-f", metavar="FILE", help="Read the prompt from a UTF-8 text file, as it is; '-' is stdin."
    ),
    click.option(
        "--chat/--raw",
        default=None,
        show_default=False,
        help="Wrap the prompt as one user message, or take it as it is. Default: --chat for models with a template.",
    ),
)


def prompt_options(command: Command) -> Command:
    """Give a command the arguments `prompt`, `file` and `chat`."""
    for option in reversed(_OPTIONS):
        option(command)
    return command


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt of the command line, of a file or of a pipe. ConfigError for none or two, RequestError when empty."""
    if prompt is not None and file is not None:
        raise ConfigError("give a prompt or --file FILE, not both")
    if prompt is None and file is None:
        return _piped_prompt()
    text = prompt if prompt is not None else read_text(str(file))
    if not text.strip():
        raise RequestError("the prompt is empty; give some text")
    return text


def _piped_prompt() -> str:
    piped = sys.stdin is not None and not sys.stdin.isatty()
    text = read_text("-") if piped else ""
    if not text.strip():
        raise ConfigError("no prompt: give one as an argument, with --file FILE, or through a pipe")
    return text


def encode_prompt(llm: LLM, text: str, chat: bool | None) -> list[int]:
    """Token ids; `chat`: as one user message, None = when the model has a template."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise RequestError("this model has no tokenizer")
    if chat or (chat is None and tokenizer.chat_template is not None):
        return llm.chat_prompt([{"role": "user", "content": text}])
    return tokenizer.encode(text)

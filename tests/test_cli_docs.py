"""docs/cli.md says what --help says, and the pages' examples are commands that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest

from hvd.cli.main import hvd

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli_docs", ROOT / "scripts" / "make_cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_help_says(maker: ModuleType) -> None:
    assert maker.PAGE.read_text("utf-8") == maker.render(), "run scripts/make_cli_docs.py"


def test_the_page_has_every_command_and_every_option(maker: ModuleType) -> None:
    page = maker.PAGE.read_text("utf-8")
    for path, command in commands(hvd, "hvd"):
        section = page.split(f"## {path}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            assert all(option in section for option in parameter.opts if option.startswith("--")), path


def commands(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    found = [(path, command)]
    if isinstance(command, click.Group):
        below = [(name, child) for name, child in command.commands.items() if not child.hidden]
        found += [entry for name, child in below for entry in commands(child, f"{path} {name}")]
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/cli.md"])
def test_examples_parse(page: str) -> None:
    """Every `hvd ...` line of a code block, and in the running text, names commands and options that exist."""
    text = (ROOT / page).read_text("utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) + re.findall(r"(?<!`)`(hvd [^`\n]+)`(?!`)", text)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    examples = [line for line in lines if re.match(r"hvd [a-z]", line)]
    assert examples
    for example in examples:
        words = shlex.split(re.split(r" [<>|] ", example)[0], comments=True)
        parse(hvd, words[1:], example)


def parse(command: click.Command, words: list[str], example: str) -> None:
    if isinstance(command, click.Group):
        assert words, example
        assert words[0] in command.commands, example
        parse(command.commands[words[0]], words[1:], example)
        return
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= known | {"--help"}, example

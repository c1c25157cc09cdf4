"""Chat messages -> prompt text, by the Jinja template that comes with a model (transformers' dialect)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from hvd.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, object]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """Render messages. RequestError for messages that are malformed or that the template refuses.

    A template that knows no role "tool" gets such messages with the role "user".
    """
    knows_tools = re.search(r"""['"]tool['"]""", template) is not None
    if tools and "tools" not in template:
        raise RequestError("this model's chat template does not take tools; describe them in the system message")
    plain = [_plain_message(message, knows_tools, "tool_calls" in template) for message in messages]
    if not plain:
        raise RequestError("messages must not be empty")
    compiled = _compile(template)
    try:
        return compiled.render(messages=plain, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
    except Exception as error:  # a template is a program: it can fail in any way
        raise RequestError(f"the chat template refuses these messages: {str(error) or type(error).__name__}") from error


def _plain_message(message: Message, knows_tools: bool, knows_calls: bool) -> dict[str, object]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message must be an object with a role and a content, got {message!r}")
    if message.get("tool_calls") and not knows_calls:
        raise RequestError(
            "this model's chat template does not take tool_calls; write the calls into the message's content"
        )
    plain = dict(message)
    plain["content"] = _text_of(message.get("content"))
    if plain["role"] == "tool" and not knows_tools:
        plain["role"] = "user"
    return plain


def _text_of(content: object) -> str:
    """The text of a message: a string, nothing (assistant messages with tool calls), or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"a message's content must be a string or a list of parts, got {type(content).__name__}")
    return "".join(_text_of_part(part) for part in content)


def _text_of_part(part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"a content part of type {kind!r} is not supported; only text parts are")


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant says, for training; to us it is transparent."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except Exception as error:  # jinja2's own, and Python's for what jinja2 made of it
        raise RequestError(f"the model's chat template is faulty: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters; a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)

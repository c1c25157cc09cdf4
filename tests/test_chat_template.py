"""Chat templates: the dialect, tools, parts, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd.chat_template import render_chat
from hvd.errors import RequestError
from hvd.models.checkpoint import load_checkpoint

ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TOOL_ROLE = ROLES + "{% if messages[0].role == 'tool' %}{% endif %}"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (ROLES + "{% if add_generation_prompt %}>{% endif %}", "[user]hi>"),
        ("{% for m in messages %}\n    x\n{% endfor %}\n", "    x\n"),
        ("{% for m in messages * 3 %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "abhic"),
        ("{{ bos_token }}{{ missing }}|", "<s>|"),
    ],
)
def test_dialect(template: str, text: str) -> None:
    assert render_chat(template, USER, bos_token="<s>") == text


@pytest.mark.parametrize(
    "template",
    ["{{ 1 / 0 }}", "{{ messages[0].content[9].x }}", "{{ range(10**9) }}", "{{ 'x' + 1 }}"],
)
def test_a_template_that_fails_while_it_runs(template: str) -> None:
    with pytest.raises(RequestError, match=r"chat template refuses these messages: .+"):
        render_chat(template, USER)


def test_without_generation_prompt() -> None:
    assert (
        render_chat(ROLES + "{% if add_generation_prompt %}>{% endif %}", USER, add_generation_prompt=False)
        == "[user]hi"
    )


def test_tool_messages_become_the_users_where_the_template_knows_no_tools() -> None:
    messages = [{"role": "tool", "content": "42", "name": "f"}, *USER]
    assert render_chat(ROLES, messages) == "[user]42[user]hi"
    assert render_chat(TOOL_ROLE, messages) == "[tool]42[user]hi"
    assert messages[0]["role"] == "tool"


def test_text_parts_equal_the_joined_string() -> None:
    """K6-05."""
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]
    assert render_chat(ROLES, [{"role": "user", "content": parts}]) == "[user]a\nb"
    assert render_chat(ROLES, [{"role": "assistant", "content": None}]) == "[assistant]"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}], "'image_url'"),
        ([{"type": "video"}], "'video'"),
        (["a"], "'str'"),
        ([{"type": "text", "text": 3}], "'text'"),
        (3, "int"),
        ({"type": "text", "text": "a"}, "dict"),
    ],
)
def test_other_parts_are_refused(content: Any, named: str) -> None:
    """K6-05."""
    with pytest.raises(RequestError, match=named):
        render_chat(ROLES, [{"role": "user", "content": content}])


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}], [{"role": 3, "content": "hi"}]])
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        render_chat(ROLES, messages)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", "refuses these messages"),
        ("{{ messages.append(3) }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{% if %}", "template is faulty"),
    ],
)
def test_what_the_template_refuses(template: str, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        render_chat(template, USER)


def test_tools_are_not_dropped_silently() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    calls = [{"role": "assistant", "content": None, "tool_calls": tools}]
    with pytest.raises(RequestError, match="does not take tools"):
        render_chat(ROLES, USER, tools=tools)
    with pytest.raises(RequestError, match="does not take tool_calls"):
        render_chat(ROLES, calls)
    assert render_chat("{{ tools[0].function.name }}", USER, tools=tools) == "f"
    assert render_chat("{{ messages[0].tool_calls[0].function.name }}", calls) == "f"


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    tokenizer = load_checkpoint(smollm2).tokenizer()
    messages = [
        {"role": "system", "content": "S"},
        *USER,
        {"role": "assistant", "content": "yo"},
        {"role": "tool", "content": "7"},
    ]
    text = tokenizer.apply_chat_template(messages)
    turns = [("system", "S"), ("user", "hi"), ("assistant", "yo"), ("user", "7")]
    marked = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert text == marked + "<|im_start|>assistant\n"
    assert tokenizer.encode(text, add_special_tokens=False).count(1) == 5
    assert tokenizer.apply_chat_template(USER).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )


@pytest.mark.model
def test_qwen_coder(qwen_coder: Path) -> None:
    tokenizer = load_checkpoint(qwen_coder).tokenizer()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"<": "é"}}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools)
    assert "<tools>\n" + json.dumps(tools[0], ensure_ascii=False) + "\n</tools>" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text
    assert text.endswith("<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n")

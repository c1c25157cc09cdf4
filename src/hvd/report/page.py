"""The shell of every page: one file that asks the network for nothing.

The content security policy lets run what is in the file (named by its hash) and nothing else; data travels as a JSON
block that scripts put on the screen with `textContent` alone. So whatever a prompt or a model's text holds stays text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from hvd.errors import ConfigError
from hvd.payoff.files import write_whole

_ASSETS = files(__package__) / "assets"
_LONE = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]")


def page(title: str, body: str, *, assets: Sequence[str], data: Mapping[str, Any]) -> str:
    """A whole HTML document.

    body     trusted HTML; put foreign text into it with `html.escape(visible(text))`
    assets   names of files in assets/: `.css` and `.js`, in order
    data     JSON values for the scripts, found there as `JSON.parse` of the element "data"
    """
    styles = [_asset(name) for name in assets if name.endswith(".css")]
    scripts = [_asset(name) for name in assets if name.endswith(".js")]
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hashes(styles)}; script-src {_hashes(scripts)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
        f"<title>{escape(visible(title))}</title>",
        *(f"<style>{style}</style>" for style in styles),
        f'</head>\n<body>\n{body}\n<script type="application/json" id="data">{_embedded(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>\n</html>\n",
    ]
    return _LONE.sub("\ufffd", "\n".join(parts))


def write_page(path: Path, text: str) -> None:
    """Write a page whole. ConfigError when the disk refuses."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror or error}") from error


def visible(text: str) -> str:
    """Control characters as pictures: nothing unseen, nothing that turns the direction of what stands around it."""
    return _CONTROLS.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\u2039U+{code:04X}\u203a"


def _asset(name: str) -> str:
    """A file of assets/, with line ends around it, so that hash and element hold the same text."""
    return "\n" + (_ASSETS / name).read_text("utf-8")


def _hashes(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that can't end its element, nor be taken for markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")

"""EAGLE3 heads that ship with the package, used where the target is the one that they were trained for.

scripts/train-demo makes them anew. `index.json` says which target each is for, and the digests of its files:

    {"<fingerprint of the target>": {"folder": "name", "files": {"model.safetensors": "<BLAKE2b-256>", ..}}}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd.errors import CheckpointError, ConfigError

AUTO = "auto"
"""Given in place of a head: the shipped one, where there is one for this target."""
NONE = "none"
"""Given in place of a head: no head."""

ROOT = Path(__file__).parent
_PLAIN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
FILES = ("model.safetensors", "config.json")


def choose_head(given: str | Path | None, fingerprint: str, root: Path = ROOT) -> str | Path | None:
    """The head to load for a target: what was given, the shipped one for "auto", None for "none" and None.

    Raises ConfigError for what is no path, CheckpointError when a shipped head is not as it was shipped.
    """
    if given is not None and not isinstance(given, str | Path):
        raise ConfigError(f"eagle3 must be a head's directory or hub id, {AUTO!r} or {NONE!r}, got {given!r}")
    if given is None or given == NONE:
        return None
    if given != AUTO:
        return given
    index = read_index(root)
    return _checked(*_entry(index[fingerprint], root)) if fingerprint in index else None


def read_index(root: Path = ROOT) -> dict[str, Any]:
    """What ships, by fingerprint of the target. Raises CheckpointError when the index is damaged."""
    path = root / "index.json"
    try:
        index = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read the list of shipped heads, {path}: {error}; {_ADVICE}") from error
    if not isinstance(index, dict):
        raise CheckpointError(f"the list of shipped heads, {path}, is no JSON object; {_ADVICE}")
    return index


def digests(folder: Path) -> dict[str, str]:
    """BLAKE2b-256 of the files that matter, as the index has them."""
    return {name: hashlib.blake2b((folder / name).read_bytes(), digest_size=32).hexdigest() for name in FILES}


def _entry(entry: object, root: Path) -> tuple[Path, Mapping[str, str]]:
    """Folder and digests of an entry of the index. CheckpointError when it is not as `index.json` should have it."""
    folder, files = (entry.get("folder"), entry.get("files")) if isinstance(entry, dict) else (None, None)
    if not isinstance(folder, str) or not _PLAIN_NAME.fullmatch(folder) or not isinstance(files, dict):
        raise CheckpointError(f"the list of shipped heads, {root / 'index.json'}, was changed; {_ADVICE}")
    return root / folder, files


def _checked(folder: Path, expected: Mapping[str, str]) -> Path:
    try:
        found = digests(folder)
    except OSError as error:
        raise CheckpointError(f"the shipped EAGLE3 head in {folder} is incomplete ({error}); {_ADVICE}") from error
    wrong = [name for name in FILES if found[name] != expected.get(name)]
    if wrong:
        raise CheckpointError(f"the shipped EAGLE3 head in {folder} was changed: {', '.join(wrong)}; {_ADVICE}")
    return folder


_ADVICE = "install hvd again, or go without: eagle3='none' (on the command line --eagle3 none)"

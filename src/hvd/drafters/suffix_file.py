"""A suffix cache's finished responses in one file, and back.

The file holds token ids, not trees: trees are rebuilt when it is loaded (about a million tokens a second), so nothing
in a file can make a tree inconsistent.

    bytes 0-7     magic "HVDSUFFX"
    bytes 8-11    format version, little-endian
    bytes 12-15   length of the header, little-endian
    header        JSON: tokenizer, vocab_size, scopes [{name, lengths}], least recently used scope first
    tokens        int32, little-endian: all responses, one after the other
    last 32       SHA-256 of everything before
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hvd.drafters.suffix import SuffixDrafter
from hvd.errors import CacheFileError
from hvd.types import Int32Array

MAGIC = b"HVDSUFFX"
VERSION = 1
_PREFIX = struct.Struct("<8sII")
_DIGEST = hashlib.sha256().digest_size


def save(drafter: SuffixDrafter, path: str | Path) -> None:
    """Write all scopes' finished responses to `path`, replacing it whole or not at all. Only the owner can read it."""
    scopes = list(drafter.shared)
    header = {
        "tokenizer": drafter.tokenizer_fingerprint,
        "vocab_size": drafter.vocab_size,
        "scopes": [{"name": name, "lengths": [len(text) for text in texts]} for name, texts in scopes],
    }
    encoded = json.dumps(header).encode()
    body = b"".join(
        [_PREFIX.pack(MAGIC, VERSION, len(encoded)), encoded]
        + [text.astype("<i4").tobytes() for _, texts in scopes for text in texts]
    )
    _replace(Path(path), body + hashlib.sha256(body).digest())


def load(drafter: SuffixDrafter, path: str | Path) -> int:
    """Add the responses in `path` to the drafter's scopes, within its bound of bytes; returns how many were read.

    Raises `CacheFileError` when the file is missing, torn, of another format or made with another tokenizer or
    vocabulary. The file is left alone, and the drafter as it was.
    """
    header, tokens = _read(Path(path))
    _check_origin(drafter, header, Path(path))
    texts = _cut(header, tokens, Path(path))
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= drafter.vocab_size):
        raise CacheFileError(f"{path} holds token ids outside the vocabulary of {drafter.vocab_size}; delete it")
    for scope, text in texts:
        drafter.add_response(scope, text)
    return len(texts)


def _read(path: Path) -> tuple[dict[str, Any], Int32Array]:
    """Header and tokens of a whole, current file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CacheFileError(f"can't read the suffix cache file {path}: {error.strerror}") from error
    if data[:8] != MAGIC:
        raise CacheFileError(f"{path} is not a suffix cache file; name another or delete it")
    if len(data) < _PREFIX.size + _DIGEST:
        raise CacheFileError(f"{path} is torn: it ends after {len(data)} bytes; delete it")
    _, version, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise CacheFileError(f"{path} has format {version}, this version reads format {VERSION}; delete it")
    if hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise CacheFileError(f"{path} is torn: its checksum does not match; delete it")
    start = _PREFIX.size + length
    try:
        header = json.loads(data[_PREFIX.size : start])
        tokens = np.frombuffer(data[start:-_DIGEST], "<i4").astype(np.int32)
    except (ValueError, RecursionError) as error:
        raise CacheFileError(f"{path} can't be understood ({error}); delete it") from error
    if not isinstance(header, dict):
        raise CacheFileError(f"the header of {path} can't be understood; delete it")
    return header, tokens


def _check_origin(drafter: SuffixDrafter, header: dict[str, Any], path: Path) -> None:
    made_with = header.get("tokenizer"), header.get("vocab_size")
    ours = drafter.tokenizer_fingerprint, drafter.vocab_size
    if made_with != ours:
        raise CacheFileError(
            f"{path} was made with another tokenizer ({made_with[0]}, {made_with[1]} ids; "
            f"this model's is {ours[0]}, {ours[1]} ids); use a file of this model"
        )


def _cut(header: dict[str, Any], tokens: Int32Array, path: Path) -> list[tuple[str, Int32Array]]:
    """Scope and tokens of every response."""
    try:
        named = [(str(scope["name"]), n) for scope in header["scopes"] for n in scope["lengths"]]
        if any(type(n) is not int for _, n in named):
            raise TypeError("lengths must be whole numbers")
    except (KeyError, TypeError) as error:
        raise CacheFileError(f"the header of {path} can't be understood ({error!r}); delete it") from error
    if sum(n for _, n in named) != len(tokens) or any(n < 0 for _, n in named):
        raise CacheFileError(f"{path} holds {len(tokens)} tokens, its header speaks of others; delete it")
    ends = np.cumsum([n for _, n in named])
    return [(scope, tokens[end - n : end]) for (scope, n), end in zip(named, ends, strict=True)]


def _replace(path: Path, data: bytes) -> None:
    """Write to a temporary name in the same folder (made if missing; only the owner can read it), sync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

"""Text <-> token ids, chat templates. Wraps a `tokenizers.Tokenizer`; the engine below knows no text."""

from __future__ import annotations

import hashlib
import json
import os
import re
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders

from hvd.chat_template import render_chat
from hvd.detokenizer import IncrementalDetokenizer, fallback_byte
from hvd.errors import CheckpointError, RequestError

__all__ = ["IncrementalDetokenizer", "TokenClass", "Tokenizer", "read_eos_token_ids"]

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_ID = 2**31
_ID = re.compile("[0-9]{1,10}")
_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
SPACE_MARK = "\u2581"


class TokenClass:
    """Bits of `Tokenizer.token_classes`. Only ASCII characters count; "has" means anywhere in the token."""

    STARTS_WITH_SPACE = 1
    HAS_NEWLINE = 2
    ONLY_SPACE = 4
    HAS_PUNCTUATION = 8
    HAS_BRACKET = 16
    HAS_DELIMITER = 32
    HAS_DIGIT = 64
    SPECIAL = 128


class Tokenizer:
    """A tokenizer with what belongs to it: special tokens, end-of-sequence ids, chat template.

    vocab_size      ids run from 0 to vocab_size - 1 (a model's vocabulary may be padded beyond)
    bos_token_id    None if the model has none
    eos_token_ids   ids that end a text
    chat_template   Jinja source; None for a base model
    decoder         the wrapped tokenizer's decoder; None if it has none
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wrap `inner`. `special_tokens`: names as in SPECIAL_NAMES -> token; templates may use them."""
        self._inner = inner
        self._special_tokens = dict(special_tokens or {})
        added = inner.get_added_tokens_decoder()
        self._special = {id_ for id_, token in added.items() if token.special}
        self.vocab_size = _size_of(inner, added)
        self.bos_token_id = self._id_of("bos_token")
        end = self._id_of("eos_token")
        self.eos_token_ids = tuple(eos_token_ids) or (() if end is None else (end,))
        self.chat_template = chat_template
        self.decoder: decoders.Decoder | None = inner.decoder
        self._byte_level = isinstance(self.decoder, decoders.ByteLevel)
        self._bytes: dict[str, bytes] = {}

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

        tokenizer.json alone says what is put around a text (transformers too ignores add_bos_token beside it).
        Raises CheckpointError if tokenizer.json is missing or torn; the others are optional.
        """
        path = Path(path)
        config = _read_json(path / "tokenizer_config.json")
        inner = _read_inner(path / "tokenizer.json")
        special = {name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name)))}
        _add_tokens(inner, config, special)
        return cls(
            inner,
            special_tokens=special,
            eos_token_ids=read_eos_token_ids(path),
            chat_template=_read_template(path, config),
        )

    def save(self, path: str | Path) -> None:
        """Write files that `from_directory` reads back to an equal tokenizer, into the directory `path`."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        config = {**self._special_tokens, "chat_template": self.chat_template}
        _write(path / "tokenizer.json", self._inner.to_str())
        _write(path / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=1))
        _write(path / "generation_config.json", json.dumps({"eos_token_id": list(self.eos_token_ids)}))

    def _id_of(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._inner.token_to_id(text)

    @cached_property
    def fingerprint(self) -> str:
        """Hex sha256 of what every id stands for, and which are special: same fingerprint, same ids."""
        return hashlib.sha256(json.dumps([self._spellings, sorted(self._special)]).encode()).hexdigest()

    @cached_property
    def _spellings(self) -> list[str]:
        """All tokens as the vocabulary spells them, "" where an id is free."""
        return [self._inner.id_to_token(id_) or "" for id_ in range(self.vocab_size)]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; `add_special_tokens` puts the model's begin token in front where it has that habit.

        Raises RequestError for lone surrogates, and for what is no string.
        """
        try:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:
            raise RequestError("text must be a string of valid Unicode (no lone surrogates)") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text. Ids outside the vocabulary give nothing; bytes that are no UTF-8 become replacement marks."""
        known = [int(id_) for id_ in ids if 0 <= id_ < _MAX_ID]
        return self._inner.decode(known, skip_special_tokens=skip_special_tokens)

    def token(self, id_: int, skip_special_tokens: bool) -> str | None:
        """The token as the vocabulary spells it; None outside the vocabulary or when skipped as special."""
        if not 0 <= id_ < _MAX_ID or (skip_special_tokens and id_ in self._special):
            return None
        return self._inner.id_to_token(id_)

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that one token adds to a text; b"" for special tokens and outside the vocabulary."""
        token = self.token(id_, True)
        return b"" if token is None else self.bytes_of(token)

    def bytes_of(self, token: str) -> bytes:
        """Bytes of a token spelled as in the vocabulary."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell_out(token)
        return known

    def _spell_out(self, token: str) -> bytes:
        if self._byte_level:
            # An added token whose letters are not all of the byte alphabet stands for itself (as in tokenizers).
            spelled = [BYTE_OF_LETTER.get(letter, -1) for letter in token]
            return token.encode() if -1 in spelled else bytes(spelled)
        byte = fallback_byte(token)
        return token.replace(SPACE_MARK, " ").encode() if byte is None else bytes([byte])

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Messages to prompt text; encode it with add_special_tokens=False. See `hvd.chat_template`.

        Raises RequestError for a model without template and for messages that are malformed or that it refuses.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template; give the prompt as plain text")
        return render_chat(
            self.chat_template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )

    def token_classes(self) -> NDArray[np.uint8]:
        """uint8 [vocab_size]: for each token the bits of `TokenClass`. Computed anew; keep it."""
        tokens = self._spellings
        if not self._byte_level:
            tokens = [self.bytes_of(token).decode("latin-1") for token in tokens]
        classes = np.zeros(self.vocab_size, np.uint8)
        lengths = np.fromiter(map(len, tokens), np.int64, self.vocab_size)
        full = np.flatnonzero(lengths)
        if len(full):
            letters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32)
            bits = _letter_classes(self._byte_level)[np.minimum(letters, _LETTERS - 1)]
            starts = (np.cumsum(lengths) - lengths)[full]
            has = np.bitwise_or.reduceat(bits, starts) & ~np.uint8(TokenClass.ONLY_SPACE)
            only_space = np.bitwise_and.reduceat(bits, starts) & TokenClass.ONLY_SPACE
            starts_with_space = (bits[starts] & TokenClass.ONLY_SPACE) // TokenClass.ONLY_SPACE
            classes[full] = has | only_space | starts_with_space
        classes[sorted(self._special)] = TokenClass.SPECIAL
        return classes


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_alphabet()
_LETTERS = 512


def _letter_classes(byte_level: bool) -> NDArray[np.uint8]:
    """uint8 [_LETTERS]: bits of one letter by code point; byte-level tokens spell bytes in their own alphabet."""
    kinds = (
        ("\n", TokenClass.HAS_NEWLINE),
        (string.whitespace, TokenClass.ONLY_SPACE),
        (string.punctuation, TokenClass.HAS_PUNCTUATION),
        ("()[]{}", TokenClass.HAS_BRACKET),
        ("\"'`,:;=", TokenClass.HAS_DELIMITER),
        (string.digits, TokenClass.HAS_DIGIT),
    )
    bits = np.zeros(_LETTERS, np.uint8)
    for letters, bit in kinds:
        bits[[ord(letter) for letter in letters]] |= bit
    if byte_level:
        for letter, byte in BYTE_OF_LETTER.items():
            bits[ord(letter)] = bits[byte]
    return bits


def _size_of(inner: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> int:
    """Highest id + 1. The number of tokens is that, unless some ids below are free (then the last ids are tried)."""
    size = max(inner.get_vocab_size(with_added_tokens=True), 1 + max(added, default=-1))
    while inner.id_to_token(size) is not None:
        size += 1
    return size


def read_eos_token_ids(path: Path, vocab_size: int = _MAX_ID) -> tuple[int, ...]:
    """End-of-sequence ids of a Hugging Face directory: generation_config.json's, else config.json's, else none.

    CheckpointError for what is no id below `vocab_size`.
    """
    for file in ("generation_config.json", "config.json"):
        stated = _read_json(path / file).get("eos_token_id")
        ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
        if any(type(id_) is not int or not 0 <= id_ < vocab_size for id_ in ids):
            raise CheckpointError(
                f"{path / file}: eos_token_id must be ids from 0 to {vocab_size - 1}, got {str(stated)[:60]!r}"
            )
        if ids:
            return tuple(ids)
    return ()


def _read_inner(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no tokenizer.json (a SentencePiece or slow tokenizer alone is not read)"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{path} can't be read: {error}") from error


def _add_tokens(inner: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that tokenizer_config.json knows and tokenizer.json does not."""
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    for id_, token in _described(config):
        content = token["content"]
        if content not in known:
            flags = {key: bool(token[key]) for key in _TOKEN_FLAGS if key in token}
            inner.add_tokens([AddedToken(content, **flags)])
            known.add(content)
        if (other := inner.token_to_id(content)) != id_:
            raise CheckpointError(f"token {content!r}: id {id_} by tokenizer_config.json, {other} by tokenizer.json")
    inner.add_special_tokens([AddedToken(text, normalized=False) for text in special.values() if text not in known])


def _described(config: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Ids and tokens of added_tokens_decoder, by id."""
    described = config.get("added_tokens_decoder") or {}
    tokens: list[tuple[int, Mapping[str, Any]]] = []
    for id_, token in described.items() if isinstance(described, Mapping) else [("", described)]:
        if not (isinstance(token, Mapping) and isinstance(token.get("content"), str) and _ID.fullmatch(id_)):
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder must be ids with tokens, got {str((id_, token))[:60]}"
            )
        tokens.append((int(id_), token))
    return sorted(tokens, key=lambda entry: entry[0])


def _token_text(token: object) -> str | None:
    """A special token is written as a string or as an object with a content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _read_template(path: Path, config: Mapping[str, Any]) -> str | None:
    if (path / "chat_template.jinja").is_file():
        try:
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / 'chat_template.jinja'} can't be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        try:
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path / 'tokenizer_config.json'}: a chat_template in a list needs a name and a template"
            ) from error
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object: {} when the file is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return content


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

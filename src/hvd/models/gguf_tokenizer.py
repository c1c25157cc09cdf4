"""The tokenizer inside a GGUF file: byte-level BPE ("gpt2") or SentencePiece with byte fallback ("llama").

Pre-tokenizers are those of the original models, which the file only names (tokenizer.ggml.pre). Text is not normalized
to NFC, although Qwen's own tokenizer.json is: no reader of GGUF files does, and text comes back from ids as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hvd.errors import CheckpointError, UnsupportedModelError
from hvd.models.gguf_file import GGUFFile
from hvd.tokenizer import SPACE_MARK, Tokenizer

Metadata = Mapping[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos", "eot", "eom")
# Control tokens that end a text whatever the metadata say: eos_token_id is one id only. llama.cpp has a list too.
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": _DEFAULT,
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def read_gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer. UnsupportedModelError for other kinds, CheckpointError for faulty metadata."""
    metadata = file.metadata
    tokens = _array(metadata, "tokens", str)
    if not tokens:
        raise CheckpointError(f"{file.path} holds no tokenizer (tokenizer.ggml.tokens)")
    kinds = _array(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path} has {len(kinds)} token types for {len(tokens)} tokens")
    builders: dict[str, Callable[..., tokenizers.Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
    model = _text(metadata, "tokenizer.ggml.model")
    if model not in builders:
        raise UnsupportedModelError(f"{file.path} has a tokenizer of kind '{model}'; read are {', '.join(builders)}")
    special = {
        name: tokens[id_] for name, key in _SPECIAL_KEYS.items() if (id_ := _token_id(metadata, key)) is not None
    }
    inner = builders[model](metadata, tokens, kinds)
    _mark_added(inner, tokens, kinds)
    inner.post_processor = _frame(inner, metadata, special)
    return Tokenizer(
        inner,
        special_tokens=special,
        eos_token_ids=read_eos_ids(metadata),
        chat_template=_text(metadata, "tokenizer.chat_template"),
    )


def read_eos_ids(metadata: Metadata) -> tuple[int, ...]:
    """End-of-sequence ids: eos, end of turn, end of message, and control tokens that are known to end a text."""
    tokens, kinds = _array(metadata, "tokens", str), _array(metadata, "token_type", int)
    named = [id_ for key in _END_KEYS if (id_ := _token_id(metadata, key)) is not None]
    ends = enumerate(zip(tokens, kinds, strict=False))
    known = [id_ for id_, (token, kind) in ends if kind == _CONTROL and token in _END_TEXTS]
    return tuple(dict.fromkeys([*named, *known]))


def _token_id(metadata: Metadata, key: str) -> int | None:
    id_ = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return id_ if type(id_) is int and 0 <= id_ < len(_array(metadata, "tokens", str)) else None


def _array(metadata: Metadata, key: str, kind: type) -> list[Any]:
    """A list of the metadata, [] where there is none. All items of a GGUF array are of one kind: the first tells."""
    value = metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(value, list) or (value and type(value[0]) is not kind):
        raise CheckpointError(f"tokenizer.ggml.{key} must be a list of {kind.__name__}, got {str(value)[:60]!r}")
    return value


def _text(metadata: Metadata, key: str, default: str | None = None) -> str | None:
    value = metadata.get(key, default)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{key} must be a text, got {str(value)[:60]!r}")
    return value


def _byte_level(metadata: Metadata, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    pre = _text(metadata, "tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"the tokenizer's pre-tokenizer '{pre}' is not known; known are {', '.join(_SPLITS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges", str)]
    model = _bpe(tokens, kinds, merges, ignore_merges=pre in _LLAMA3_NAMES)
    inner = tokenizers.Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(metadata: Metadata, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    scores = _array(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError("the SentencePiece tokenizer has no score for every token (tokenizer.ggml.scores)")
    merges = _merges_by_score(tokens, kinds, scores)
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    inner = tokenizers.Tokenizer(_bpe(tokens, kinds, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", SPACE_MARK)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), escape]) if prefix else escape
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return inner


def _bpe(tokens: list[str], kinds: list[int], merges: list[Any], **options: Any) -> models.BPE:
    vocab = {token: id_ for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"the tokenizer's merges do not fit its vocabulary: {error}") from error


def _merges_by_score(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best; BPE wants that as an ordered list of pairs."""
    normal = {
        token: id_ for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (_NORMAL, _UNUSED)
    }
    pairs = [
        (-scores[id_], id_, token[:cut], token[cut:])
        for token, id_ in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    return [(left, right) for _, _, left, right in sorted(pairs)]


def _mark_added(inner: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Tokens that are found in a text before it is split; control tokens are special."""
    by_kind = list(zip(tokens, kinds, strict=True))
    inner.add_tokens([AddedToken(token, normalized=False) for token, kind in by_kind if kind == _USER_DEFINED])
    special = [AddedToken(token, normalized=False) for token, kind in by_kind if kind in (_CONTROL, _UNKNOWN)]
    inner.add_special_tokens(special)


def _frame(inner: tokenizers.Tokenizer, metadata: Metadata, special: Mapping[str, str]) -> processors.PostProcessor:
    """Puts the begin token in front of a text and the end token behind it, where the model has that habit."""
    begins = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    begin = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", begins) else None
    end = special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    template = [piece for piece in (begin, "$A", end) if piece is not None]
    ids = [(token, inner.token_to_id(token)) for token in (begin, end) if token is not None]
    try:
        return processors.TemplateProcessing(single=template, pair=[*template, "$B"], special_tokens=ids)
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"the begin or end token can't be put around a text: {error}") from error

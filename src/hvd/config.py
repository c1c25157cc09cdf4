"""Parameters a caller sets. Each class checks itself when made and raises `ConfigError` in one clear line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hvd.errors import ConfigError

LARGEST_ID = 2**31 - 1


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse what is not a finite number in [low, high] (or (low, high]); NaN compares false, so test it by name."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if value < low or value > high or (low_open and value == low):
        raise ConfigError(f"{name} must be in {'(' if low_open else '['}{low:g}, {high:g}], got {value!r}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ConfigError(
            f"{name} must be at least {low}" + (f" and at most {high}" if high is not None else "") + f", got {value}"
        )


def _sequence(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, tuple | list):
        raise ConfigError(f"{name} must be a tuple or list, got {value!r}")
    return tuple(value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids as a tuple."""
    ids = _sequence(name, value)
    for token in ids:
        _integer(f"{name}: token id", token, 0, LARGEST_ID)
    return ids  # type: ignore[return-value]


def _texts(name: str, value: object) -> None:
    for text in _sequence(name, value):
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{name} must hold non-empty strings, got {text!r}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become tokens, and when to stop. docs/losslessness.md has the filter order.

    max_tokens           most tokens to generate; None = up to the model's context
    temperature          0 = greedy
    top_k                keep the k likeliest; 0 or -1 = all
    top_p                keep the smallest set of likeliest tokens whose probability reaches top_p; 1 = all
    min_p                drop tokens less likely than min_p times the likeliest; 0 = all
    seed                 None = a fresh seed for each request; an int = the same text every time
    repetition_penalty   > 1 weakens tokens of prompt and output (CTRL rule); 1 = off
    presence_penalty     subtracted once from the logit of every token in the output
    frequency_penalty    subtracted from the logit once for each occurrence in the output
    logit_bias           token id -> added to its logit
    bad_words            token id sequences that must not appear in the output
    min_tokens           no stop before so many tokens
    stop_token_ids       further ids that end the request (the id is part of token_ids, not of the text)
    stop                 texts that end the request (the stop text is not part of the text)
    ignore_eos           go on after the model's end-of-sequence token
    logprobs             None = none; n = log-probability of each token and of the n likeliest
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, -1)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if not isinstance(self.logit_bias, dict):
            raise ConfigError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias key", token, 0, LARGEST_ID)
            _number(f"logit_bias[{token}]", bias, -1e9, 1e9)
        words = [_ids("bad_words entry", word) for word in _sequence("bad_words", self.bad_words)]
        if not all(words):
            raise ConfigError("bad_words must not hold an empty sequence")
        object.__setattr__(self, "bad_words", tuple(words))  # lists are welcome, and compared as tuples
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        _texts("stop", self.stop)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 1000)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """The suffix cache.

    mode              "longest": longest match, draft length not capped by it; "arctic": as ArcticInference 0.3.0
    max_depth         depth of the trie, tokens of context + draft that one path can hold
    max_draft         most tokens in a draft
    max_spec_factor   arctic: draft length <= factor * match length + offset
    max_spec_offset   arctic: see above
    min_token_prob    a draft ends where the running product of count ratios falls below this
    shared            also use the responses of earlier requests of the same scope
    max_bytes         bound of all tries together; least recently used responses leave first
    """

    mode: str = "longest"
    max_depth: int = 64
    max_draft: int = 64
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    shared: bool = True
    max_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.mode not in ("longest", "arctic"):
            raise ConfigError(f"suffix mode must be 'longest' or 'arctic', got {self.mode!r}")
        _integer("max_depth", self.max_depth, 2, 4096)
        _integer("max_draft", self.max_draft, 1, 4096)
        _number("max_spec_factor", self.max_spec_factor, 0.0, 1e6)
        _number("max_spec_offset", self.max_spec_offset, -1e6, 1e6)
        _number("min_token_prob", self.min_token_prob, 0.0, 1.0)
        _integer("max_bytes", self.max_bytes, 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """How the EAGLE3 head drafts.

    shape         "chain": one token a pass; "tree": dynamic tree, `depth` passes of `top_k` nodes, best `total` kept
    chain_length  most tokens of a chain
    min_prob      a chain ends where the head's own probability of all of it falls below this; 0 = never
    total         nodes kept of a tree
    depth         levels of a tree
    top_k         nodes expanded a level, and children each is given
    weights       the head's numbers on a CPU: "int4", "int8" or "fp32". Bytes count, for drafting begins on a cold
                  cache: 4 bits take half the time and accept 2 % fewer tokens (docs/log.md)
    """

    shape: str = "chain"
    chain_length: int = 4
    min_prob: float = 0.15
    total: int = 32
    depth: int = 8
    top_k: int = 4
    weights: str = "int4"

    def __post_init__(self) -> None:
        if self.shape not in ("chain", "tree"):
            raise ConfigError(f"eagle3 shape must be 'chain' or 'tree', got {self.shape!r}")
        if self.weights not in ("int4", "int8", "fp32"):
            raise ConfigError(f"weights of an EAGLE3 head must be one of int4, int8, fp32, got {self.weights!r}")
        for name in ("chain_length", "total", "depth", "top_k"):
            _integer(name, getattr(self, name), 1, 1024)
        _number("min_prob", self.min_prob, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine.

    max_batch       requests decoded side by side; more wait their turn
    prefill_chunk   most prompt tokens of one request in a pass
    suffix, eagle3  the drafters
    policy          name of the default policy (see `hvd.payoff.policy`)
    record          keep a `StepRecord` for every cycle in each result
    """

    max_batch: int = 16
    prefill_chunk: int = 256
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    eagle3: Eagle3Config = field(default_factory=Eagle3Config)
    policy: str = "hvd"
    record: bool = False

    def __post_init__(self) -> None:
        _integer("max_batch", self.max_batch, 1, 4096)
        _integer("prefill_chunk", self.prefill_chunk, 2, 65536)
        if not isinstance(self.policy, str):
            raise ConfigError(f"policy must be a policy's name, got {self.policy!r}")

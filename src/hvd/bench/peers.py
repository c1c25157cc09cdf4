"""Other programs that decode the same prompts in the same run: what they have in common, and how they are found.

A peer is a program (transformers, llama.cpp, vllm); each has one or more methods. All get the same prompt ids and the
same most tokens, decode greedily and stop at the same ids. Their arithmetic is their own, so their text need not be
ours: where it begins to differ is reported and is no error. One that is not installed is named as missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from hvd.errors import ConfigError, HVDError


class MissingPeerError(HVDError):
    """A peer can't take part: not installed, or it can't read this model."""


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What a peer is to run.

    model       as given to `hvd bench --model`: a directory, hub id or GGUF file
    threads     CPU threads; None = all cores
    stop_ids    ids that end an answer
    context     tokens that the model's context holds
    eagle3      EAGLE3 head, for peers that take one
    device      "cpu", "cuda", "cuda:1", or "auto" = a GPU where there is one. (vLLM runs where it was built for.)
    """

    model: str
    threads: int | None
    stop_ids: tuple[int, ...]
    context: int
    eagle3: str | None = None
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """What a peer made of a prompt.

    tokens            generated ids, the one that ended it included
    decoded           how many of them were made within `decode_seconds`: those after the first token, or batch of them
    prefill_seconds   up to the first token
    """

    tokens: list[int]
    decoded: int
    decode_seconds: float
    prefill_seconds: float
    wall_seconds: float
    finish_reason: str


class PeerMethod(ABC):
    """One way of decoding of one peer.

    name    as in the tables, beginning with the peer's
    peer    the peer
    how     what is timed, and by what, in a sentence
    """

    name: str
    peer: ClassVar[str]
    how: ClassVar[str]

    @abstractmethod
    def decode(self, prompt: Sequence[int], max_tokens: int) -> PeerAnswer:
        """Decode greedily behind the prompt's ids."""

    def prepare(self, tokens: int) -> None:  # noqa: B027 - most peers need nothing
        """Make ready for prompt and answer of so many tokens together; never timed."""


_PEERS = {
    "transformers": "hvd.bench.peers_transformers",
    "llama.cpp": "hvd.bench.peers_llama_cpp",
    "vllm": "hvd.bench.peers_vllm",
}


def peer_names() -> list[str]:
    """The peers that there are adapters for."""
    return list(_PEERS)


def check_peers(names: Sequence[str]) -> None:
    """ConfigError when a name is none of a peer or of a peer's method ("vllm-ngram")."""
    for name in names:
        _peer_of(name)


def open_peers(names: Sequence[str], setup: PeerSetup) -> tuple[list[PeerMethod], dict[str, str]]:
    """The methods of peers by name ("llama.cpp": all of its; "llama.cpp-lookup": that one), and who is missing and why.

    A peer's module has METHODS, the names, and `open_methods(setup, wanted)`, which returns the same two things.
    """
    methods: list[PeerMethod] = []
    missing: dict[str, str] = {}
    for peer in dict.fromkeys(_peer_of(name) for name in names):
        module: Any = import_module(_PEERS[peer])
        wanted = [m for m in module.METHODS if peer in names or m in names]
        try:
            opened, without = module.open_methods(setup, wanted)
        except MissingPeerError as error:
            opened, without = [], {peer: str(error)}
        methods += opened
        missing |= without
    return methods, missing


def _peer_of(name: str) -> str:
    for peer, module in _PEERS.items():
        if name == peer or (name.startswith(peer) and name in import_module(module).METHODS):
            return peer
    raise ConfigError(f"unknown peer {name!r}, known are {', '.join(_PEERS)}")


def cut_at_stop(tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[list[int], str]:
    """Tokens up to the first stop id, that included, and the finish reason."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return list(tokens[: i + 1]), "stop"
    return list(tokens), "length"

"""llama.cpp through llama-cpp-python: greedy, and its prompt lookup. It reads GGUF files only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from hvd.bench.environment import usable_cores
from hvd.bench.peers import MissingPeerError, PeerAnswer, PeerMethod, PeerSetup

METHODS = ("llama.cpp", "llama.cpp-lookup")
LOOKUP_TOKENS = 10
"""Draft length of its prompt lookup: the default of llama-cpp-python."""


def open_methods(setup: PeerSetup, wanted: Sequence[str]) -> tuple[list[PeerMethod], dict[str, str]]:
    """See `hvd.bench.peers.open_peers`. MissingPeerError without the package, or for a model that is no GGUF file."""
    try:
        import llama_cpp  # noqa: F401 - whether it is there
    except ImportError as error:
        raise MissingPeerError(f"llama-cpp-python can't be imported ({error})") from error
    if not (Path(setup.model).is_file() and setup.model.endswith(".gguf")):
        raise MissingPeerError("llama.cpp reads GGUF files only; give one with --model")
    return [LlamaCpp(name, setup) for name in wanted], {}


class LlamaCpp(PeerMethod):
    """One llama.cpp context. Made anew with more room when a prompt needs it: prompt lookup keeps the logits of every
    position, which for a whole long context is gigabytes."""

    peer = "llama.cpp"
    how = "wall clock between the first and the last token of Llama.generate; up to the first token is prefill"

    def __init__(self, name: str, setup: PeerSetup) -> None:
        self.name = name
        self._setup = setup
        self._room = 0
        self._llama: Any = None

    def prepare(self, tokens: int) -> None:
        """See `PeerMethod.prepare`."""
        if tokens <= self._room:
            return
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if self._llama is not None:
            self._llama.close()
        lookup = self.name.endswith("-lookup")
        self._room = min(self._setup.context, max(1024, 1 << (tokens - 1).bit_length()))
        threads = self._setup.threads or usable_cores()
        self._llama = llama_cpp.Llama(
            self._setup.model,
            n_ctx=self._room,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0 if self._setup.device == "cpu" else -1,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None,
            verbose=False,
        )

    def decode(self, prompt: Sequence[int], max_tokens: int) -> PeerAnswer:
        """See `PeerMethod.decode`."""
        self.prepare(len(prompt) + max_tokens)
        llama, stop = self._llama, self._setup.stop_ids
        most = min(max_tokens, self._setup.context - len(prompt))
        llama.reset()  # else a prompt with a known beginning would be filled in faster
        tokens: list[int] = []
        started = perf_counter()
        first = last = started
        for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            last = perf_counter()
            first = last if not tokens else first
            tokens.append(int(token))
            if token in stop or len(tokens) == most:
                break
        ended = "stop" if tokens and tokens[-1] in stop else "length"
        return PeerAnswer(tokens, max(0, len(tokens) - 1), last - first, first - started, last - started, ended)

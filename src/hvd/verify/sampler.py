"""The one sampler: a row of the target's logits becomes a token, the same for plain and for speculative decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from hvd.config import SamplingParams
from hvd.errors import RequestError
from hvd.types import Float32Array, Float64Array, TokenLogprob
from hvd.verify import filters
from hvd.verify.noise import fresh_seed, uniform

LogitsProcessor = Callable[[Sequence[int], Float64Array], None]
"""Changes float64 [V] logits in place, given the output so far: a grammar's mask, a user's own rule."""


class Sampler:
    """Draws a request's tokens one after the other; knows its history, and so its penalties, at every place.

    params       the request's sampling parameters
    prompt       its prompt token ids
    stop_ids     ids that end it (masked until `min_tokens` are out)
    processors   further changes to the logits, applied after the parameters' own
    output       ids drawn so far
    logprobs     one entry a drawn token when the parameters ask for them
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        stop_ids: frozenset[int] = frozenset(),
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.params = params
        self.output: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.seed = fresh_seed() if params.seed is None else params.seed
        self._prompt_ids = (
            np.unique(np.asarray(prompt, np.int64)) if params.repetition_penalty != 1.0 else np.empty(0, np.int64)
        )
        self._counts: Counter[int] = Counter()
        self._stop_ids = np.asarray(sorted(stop_ids), np.int64)
        self._bias = tuple(np.asarray(list(column)) for column in (params.logit_bias, params.logit_bias.values()))
        self._processors = tuple(processors)

    def next(self, row: Float32Array) -> int:
        """The target's token given its raw logits, float [V]; recorded as committed. The row is not changed.

        Raises RequestError when the row holds NaN, or when no token is allowed.
        """
        adjusted = self._adjust(row)
        best = int(np.argmax(adjusted))
        if not adjusted[best] > -np.inf:  # argmax stops at a NaN
            raise RequestError(
                f"no token can follow at output position {len(self.output)}: all logits are NaN or masked"
            )
        token = best if self.params.greedy else self._draw(adjusted)
        if self.params.logprobs is not None:
            self.logprobs.append(raw_logprobs(row, token, self.params.logprobs))
        self.output.append(token)
        self._counts[token] += 1
        return token

    def forget(self, length: int) -> None:
        """Go back to the first `length` drawn tokens: those behind them were drawn and not committed."""
        for token in self.output[length:]:
            self._counts[token] -= 1
        self._counts = +self._counts
        del self.output[length:], self.logprobs[length:]

    def _adjust(self, row: Float32Array) -> Float32Array | Float64Array:
        """Bias, then penalties, then masks, then processors; the row itself where nothing is asked for."""
        params = self.params
        penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        masked = params.bad_words or len(self.output) < params.min_tokens
        if not (penalised or masked or params.logit_bias or self._processors):
            return row
        logits = row.astype(np.float64)
        if params.logit_bias:
            ids, values = self._bias
            inside = ids < len(logits)
            logits[ids[inside]] += values[inside]
        if penalised:
            self._penalise(logits)
        if masked:
            self._mask(logits)
        for processor in self._processors:
            processor(self.output, logits)
        return logits

    def _penalise(self, logits: Float64Array) -> None:
        """Repetition (Keskar et al. 2019, CTRL) over prompt and output, then presence and frequency over the output."""
        params = self.params
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        if params.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt_ids, ids)
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts

    def _mask(self, logits: Float64Array) -> None:
        """Forbid stops before `min_tokens`, and the last token of every bad word that has been begun."""
        if len(self.output) < self.params.min_tokens:
            logits[self._stop_ids[(self._stop_ids >= 0) & (self._stop_ids < len(logits))]] = -np.inf
        for words in self.params.bad_words:
            lead = len(words) - 1
            if (
                words[-1] < len(logits)
                and lead <= len(self.output)
                and tuple(self.output[len(self.output) - lead :]) == words[:-1]
            ):
                logits[words[-1]] = -np.inf

    def _draw(self, adjusted: Float32Array | Float64Array) -> int:
        """Temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution in order of token id."""
        params = self.params
        logits = adjusted.astype(np.float64)
        if logits.max() == np.inf:  # a processor's way to say "this one"
            logits = np.where(logits == np.inf, 0.0, -np.inf)
        ids = np.flatnonzero(logits > -np.inf)
        with np.errstate(over="ignore"):  # a tiny temperature makes differences infinite, which is right
            logits = (logits[ids] - logits[ids].max()) / params.temperature
        ids, logits = filters.top_k(ids, logits, params.top_k)
        ids, logits = filters.top_p(ids, logits, params.top_p)
        ids, logits = filters.min_p(ids, logits, params.min_p)
        cumulative = np.cumsum(np.exp(logits))
        place = np.searchsorted(cumulative, uniform(self.seed, len(self.output)) * cumulative[-1], side="right")
        return int(ids[min(int(place), len(ids) - 1)])


def raw_logprobs(row: Float32Array, token: int, top: int) -> TokenLogprob:
    """Natural-log probabilities of `token` and of the `top` likeliest under softmax of the raw row, in float64."""
    logits = row.astype(np.float64)
    peak = logits.max()
    logprobs = logits - (peak + np.log(np.exp(logits - peak).sum()))
    count = min(top, len(logits))
    likeliest = np.argpartition(-logprobs, count - 1)[:count] if count else np.empty(0, np.int64)
    likeliest = likeliest[np.lexsort((likeliest, -logprobs[likeliest]))]
    return TokenLogprob(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in likeliest))

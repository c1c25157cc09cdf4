"""One request from arrival to its end: its tokens, its place in the KV cache, its totals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hvd.config import SamplingParams
from hvd.engine.text import Piece, TextStream
from hvd.models.target import KVCache
from hvd.payoff.explanation import Explanation
from hvd.payoff.history import History
from hvd.types import Arm, ArmStats, Draft, FinishReason, Int32Array, RequestStats, StepRecord
from hvd.verify.sampler import LogitsProcessor, Sampler


class Request:
    """A prompt being continued.

    The committed text always runs ahead of the KV cache by at least one token: the last one, whose pass is the next
    cycle's. More than one token ahead means prefill (a new prompt, or a request resumed after its cache was freed).

    key         engine-made, unique for ever
    tokens      prompt + output, committed
    limit       most output tokens: max_tokens, or what the context leaves
    stop_ids    token ids that end it: the model's, unless they are ignored, and the parameters'
    observed    tokens that the drafters have been told
    watch       told of every cycle why its draft was chosen, what was drafted (None: nothing), and what came of it;
                None, as it is unless somebody sets it, costs nothing
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        policy: str,
        limit: int,
        stop_ids: frozenset[int],
        history: History,
        text: TextStream | None = None,
        scope: str = "",
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.key = -1
        self.prompt_length = len(prompt)
        self.tokens: list[int] = list(prompt)
        self.params = params
        self.policy = policy
        self.scope = scope
        self.limit = limit
        self.stop_ids = stop_ids | frozenset(params.stop_token_ids)
        self.history = history
        self.text = text
        self.sampler = Sampler(params, prompt, self.stop_ids, processors)
        self.cache: KVCache | None = None
        self.drafters: tuple[Arm, ...] = ()
        self.observed = 0
        self.watch: Callable[[Explanation, Draft | None, StepRecord], None] | None = None
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.pieces: list[Piece] = []
        self.records: list[StepRecord] = []
        self.stats = RequestStats(prompt_tokens=len(prompt))
        self.arrived = time.perf_counter()

    @property
    def output(self) -> list[int]:
        """Generated token ids."""
        return self.tokens[self.prompt_length :]

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def done(self) -> bool:
        """Whether the request has ended, one way or another."""
        return self.finish_reason is not None or self.error is not None

    @property
    def room(self) -> int:
        """Most draft tokens that a cycle may verify: one place is always left for the bonus token."""
        return self.limit - self.generated - 1

    @property
    def behind(self) -> int:
        """Committed tokens that the KV cache does not hold; 1 when the request is ready for a cycle."""
        return len(self.tokens) - (self.cache.length if self.cache is not None else 0)

    def slice(self, start: int, stop: int) -> Int32Array:
        """Tokens [start, stop) as int32."""
        return np.asarray(self.tokens[start:stop], np.int32)

    def advance(self, token: int) -> bool:
        """Commit one token; True when the request ends with it. A stop is looked for before the limit."""
        self.tokens.append(token)
        text = ""
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif self.text is not None:
            text = self.text.push(token, may_stop=self.generated > self.params.min_tokens)
            if self.text.stopped:
                self.finish_reason = FinishReason.STOP
        if self.finish_reason is None and self.generated >= self.limit:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None and self.text is not None:
            text += self.text.finish()
        self.pieces.append(Piece(token, text, Arm.PLAIN))
        return self.finish_reason is not None

    def fail(self, error: BaseException) -> None:
        """End the request by an error; a token drawn and not committed is forgotten."""
        self.error = error
        self.sampler.forget(self.generated)

    def credit(self, draft: Draft | None, accepted: int) -> None:
        """Name the drafter of the last cycle's accepted tokens (its last token is the target's own)."""
        if draft is None or accepted == 0:
            return
        first = len(self.pieces) - accepted - 1
        for i in range(first, first + accepted):
            self.pieces[i] = Piece(self.pieces[i].token, self.pieces[i].text, draft.arm)

    def record(self, record: StepRecord, keep: bool) -> None:
        """Add a cycle to the totals."""
        stats = self.stats
        stats.cycles += 1
        stats.committed += record.committed
        stats.width += record.width
        arm = stats.arms.setdefault(record.arm, ArmStats())
        arm.cycles += 1
        arm.drafted += record.drafted
        arm.accepted += record.accepted
        if keep:
            self.records.append(record)

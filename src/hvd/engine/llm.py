"""The public class: a model on this machine, decoding by Hybrid Verified Decoding.

llm = LLM("model.gguf")
[answer] = llm.chat([{"role": "user", "content": "Fix the typos: ..."}], SamplingParams(max_tokens=200))
print(answer.text, answer.stats.tokens_per_cycle)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from hvd.config import EngineConfig, SamplingParams
from hvd.drafters.base import Drafter
from hvd.drafters.eagle3 import load_eagle3_drafter
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.engine import Engine
from hvd.engine.fair_lock import FairLock
from hvd.engine.request import Request
from hvd.engine.text import Piece, TextStream
from hvd.errors import ConfigError, RequestError
from hvd.models.checkpoint import load_checkpoint
from hvd.models.eagle3_checkpoint import stated_aux_layers
from hvd.models.loader import load_target
from hvd.models.shipped import AUTO, choose_head
from hvd.models.target import Target
from hvd.payoff.cost import CostModel
from hvd.payoff.history import History
from hvd.payoff.policy import Policy, make_policy, policy_class
from hvd.payoff.predictor import Predictor
from hvd.payoff.profile import load_or_profile
from hvd.payoff.shipped import gather_predictors
from hvd.tokenizer import Tokenizer
from hvd.types import Arm, FinishReason, RequestStats, StepRecord, TokenLogprob
from hvd.verify.sampler import LogitsProcessor

Prompt = str | Sequence[int]
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    token_ids      generated ids, the one that ended the request included
    text           their text without special tokens, and without the stop text
    finish_reason  STOP, LENGTH or CANCELLED
    logprobs       one entry a token when asked for, else empty
    stats          totals, per arm
    pieces         each token with its text and the arm that drafted it
    records        one record a cycle when `EngineConfig.record` is set, else empty
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    policy: str
    stats: RequestStats
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)


class Stream(Iterator[Piece]):
    """A running request: iterate to receive its tokens as they are committed. Leaving it as a context cancels it."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self.request = request
        self._llm = llm
        self._given = 0

    def __next__(self) -> Piece:
        """The next committed token. Raises what ended the request, if anything but a stop did."""
        while True:
            with self._llm.lock:  # given up after each step, so that other threads get their turn
                if self._given < len(self.request.pieces):
                    self._given += 1
                    return self.request.pieces[self._given - 1]
                if self.request.done:
                    self._raise_error()
                    raise StopIteration
                self._llm.engine.step()

    def _raise_error(self) -> None:
        error = self.request.error
        if isinstance(error, StopIteration):  # would end the iteration as if all were well
            raise RuntimeError("a processor, drafter or policy raised StopIteration") from error
        if error is not None:
            raise error

    def cancel(self) -> bool:
        """End the request; what was committed stays readable. False if it had ended already."""
        return self._llm.cancel(self.request)

    def completion(self) -> Completion:
        """Decode to the end, and return the whole answer."""
        for _ in self:
            pass
        self._raise_error()
        return _completion(self.request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class LLM:
    """A target, its drafters and an engine.

    model      Hugging Face directory, hub id or GGUF file
    backend    "auto", "onnx" or "torch"
    weights    "auto", "int4", "int8", "fp32" (onnx) or a torch dtype name
    eagle3     EAGLE3 head directory or hub id; "auto" = the one that ships for this target, if any; "none" = no head
    predictor  payoff predictor file, or one of each kind; None = those that ship with the package; "none" = decide from
               trie probabilities and recent outcomes alone
    cost       cost file made by `hvd profile`; None = the one kept for this machine and model, made if there is none
    progress   called with (what, done, total) during long work

    Calls are safe from several threads; all their requests share the engine's passes.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str = "auto",
        weights: str = "auto",
        eagle3: str | Path | None = AUTO,
        predictor: str | Path | Sequence[str | Path] | None = None,
        cost: str | Path | None = None,
        config: EngineConfig | None = None,
        threads: int | None = None,
        device: str = "cpu",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        config = config or EngineConfig()
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ConfigError(f"threads must be a whole number from 1 on, or None for all cores, got {threads!r}")
        predictors = list(gather_predictors(predictor).values())
        checkpoint = load_checkpoint(model)
        head = choose_head(eagle3, checkpoint.fingerprint)
        layers = None if head is None else stated_aux_layers(head, checkpoint.config.num_layers)
        target, tokenizer = load_target(
            checkpoint,
            backend=backend,
            weights=weights,
            aux_layers=sorted(layers) if layers else None,
            threads=threads,
            device=device,
            progress=progress,
        )
        drafters: dict[Arm, Drafter] = {
            Arm.CACHE: SuffixDrafter(config.suffix, target.spec.vocab_size, tokenizer.fingerprint)
        }
        if head is not None:
            drafters[Arm.EAGLE3] = load_eagle3_drafter(
                head, target.spec, checkpoint.tensor, config.eagle3, threads=threads
            )
        costs = (
            CostModel.load(cost) if cost is not None else load_or_profile(target, drafters.get(Arm.EAGLE3), progress)
        )
        self._assemble(target, tokenizer, drafters, costs, config, predictors)

    @classmethod
    def from_parts(
        cls,
        target: Target,
        tokenizer: Tokenizer | None,
        drafters: Mapping[Arm, Drafter],
        cost: CostModel,
        config: EngineConfig | None = None,
        predictors: Sequence[Predictor] = (),
    ) -> LLM:
        """An LLM from parts made elsewhere: own drafters, a fake target, no tokenizer (then prompts are token ids)."""
        llm = cls.__new__(cls)
        llm._assemble(target, tokenizer, dict(drafters), cost, config or EngineConfig(), predictors)
        return llm

    def _assemble(
        self,
        target: Target,
        tokenizer: Tokenizer | None,
        drafters: dict[Arm, Drafter],
        cost: CostModel,
        config: EngineConfig,
        predictors: Sequence[Predictor],
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.config = config
        self.cost = cost
        self.drafters = drafters
        self._classes = tokenizer.token_classes() if tokenizer is not None else History.UNKNOWN_CLASSES
        self.lock = FairLock()

        by_kind = {predictor.kind: predictor for predictor in predictors}

        def build(name: str) -> Policy:
            kind = policy_class(name.partition(":")[0]).predictor_kind
            return make_policy(name, predictor=by_kind.get(kind) if kind else None)

        self.engine = Engine(target, drafters, build, cost, config)
        self.engine.policy(config.policy)

    # -- the four ways to ask -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: str | None = None,
        scope: str = "",
    ) -> list[Completion]:
        """Continue one prompt or many (text, or token ids), side by side. One completion a prompt, in order.

        Raises RequestError for an empty prompt or one that the context can't hold, ConfigError for an unknown policy;
        then none of them runs.
        """
        batch = _as_batch(prompts)
        each = (
            [params or SamplingParams()] * len(batch)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts but {len(each)} sampling parameters; give one, or one each")
        requests = [self._request(prompt, p, policy, scope) for prompt, p in zip(batch, each, strict=True)]
        streams = [self._submit(request) for request in requests]
        try:
            return [stream.completion() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: str | None = None,
        scope: str = "",
    ) -> list[Completion]:
        """Answer one conversation or many: messages are {"role", "content"}, wrapped in the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(c) for c in conversations], params, policy=policy, scope=scope)  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        policy: str | None = None,
        scope: str = "",
        processors: Sequence[LogitsProcessor] = (),
    ) -> Stream:
        """Start one request and return at once; iterate over the result to decode."""
        return self._submit(self._request(prompt, params or SamplingParams(), policy, scope, processors))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the answer begins."""
        tokenizer = self._need_tokenizer()
        if not messages:
            raise RequestError("the conversation is empty; give at least one message")
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)

    # -- shared by them -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of the engine, for all live requests."""
        with self.lock:
            self.engine.step()

    def cancel(self, request: Request) -> bool:
        """End a request. False if it has ended already."""
        with self.lock:
            return self.engine.cancel(request)

    def _submit(self, request: Request) -> Stream:
        with self.lock:
            self.engine.add(request)
        return Stream(self, request)

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        policy: str | None,
        scope: str,
        processors: Sequence[LogitsProcessor] = (),
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {params!r}")
        ids = self._need_tokenizer().encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        limit = self._check(ids)
        name = self.config.policy if policy is None else policy
        if not isinstance(name, str):
            raise ConfigError(f"policy must be a policy's name, got {name!r}")
        self.engine.policy(name)
        return Request(
            ids,
            params,
            policy=name,
            limit=limit if params.max_tokens is None else min(limit, params.max_tokens),
            stop_ids=frozenset()
            if params.ignore_eos or self.tokenizer is None
            else frozenset(self.tokenizer.eos_token_ids),
            history=History(self._classes),
            text=TextStream(self.tokenizer, params.stop) if self.tokenizer is not None else None,
            scope=scope,
            processors=processors,
        )

    def _check(self, ids: Sequence[int]) -> int:
        """Output tokens that the context leaves for this prompt."""
        spec = self.target.spec
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(ids) >= spec.context_limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the context of {spec.name} holds {spec.context_limit}, "
                "one of them for the answer"
            )
        bad = next((i for i in ids if not 0 <= i < spec.vocab_size), None)
        if bad is not None:
            raise RequestError(f"prompt token id {bad} is outside the vocabulary [0, {spec.vocab_size})")
        return spec.context_limit - len(ids)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this LLM has no tokenizer; give token ids")
        return self.tokenizer


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text is one prompt, and so is a sequence of ids."""
    if isinstance(prompts, str):
        return [prompts]
    try:
        each = list(prompts)
    except TypeError:
        raise RequestError(f"a prompt must be a text or token ids, got {prompts!r}") from None
    return [each] if each and not isinstance(each[0], str | Iterable) else each  # type: ignore[list-item, return-value]


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as ints: lists, tuples and integer arrays are welcome. Raises RequestError for anything else."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise RequestError(f"a prompt must be a text or token ids, got {prompt!r}") from None


def _completion(request: Request) -> Completion:
    assert request.finish_reason is not None
    return Completion(
        prompt_token_ids=request.tokens[: request.prompt_length],
        token_ids=request.output,
        text=request.text.text if request.text is not None else "",
        finish_reason=request.finish_reason,
        policy=request.policy,
        stats=request.stats,
        logprobs=request.sampler.logprobs,
        pieces=request.pieces,
        records=request.records,
    )

"""`hvd analyze` as a function: read logs, sample, replay, compare predictors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hvd.analysis.costs import DEFAULT, load_cost
from hvd.analysis.encode import Asked, Encoder
from hvd.analysis.learn import LEAST_GROUPS, Training, Verdict, compare, fit_all
from hvd.analysis.result import Analysis, Histogram, Loops, speedup_intervals
from hvd.analysis.sources import shares
from hvd.analysis.study import CACHE, EDGES, Study, counted, walked
from hvd.analysis.tokenizers import load_tokenizer
from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel
from hvd.payoff.predictor import Predictor, SurvivalPredictor, save_predictor
from hvd.payoff.shipped import gather_predictors
from hvd.traces.importers import RECORDED
from hvd.traces.logs import LogReader
from hvd.traces.logs_record import Recorded
from hvd.traces.logs_sample import Reservoir
from hvd.traces.logs_vllm import ADVICE, VLLM
from hvd.training.dataset import Sampling, StateSet, collect_states
from hvd.training.fit import TrainOptions
from hvd.training.loops import loop_onset
from hvd.training.replay import SimulatedHead, Walk
from hvd.training.simulate import PLAIN, Totals, play, policy_report, policy_with
from hvd.types import Arm

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

RULES = ("match-len:4", "match-len:5", "score:3")
"""Other systems' rules: TensorRT-LLM, SAM-Decoding, ArcticInference."""
HVD = "hvd"
CHARS_PER_TOKEN = 4
PROMPT_SHARE = 100
"""Prompt tokens that may be analysed for each answer token: bounds the time that long prompts take."""
MOST_STATES = 30_000
_NAMED = 3


@dataclass(frozen=True, slots=True)
class AnalyzeOptions:
    """How to analyse.

    tokenizer      directory, .gguf file or hub id; None will do for our own traces
    form           format of all files; None = see for each
    cost           an example of `hvd.analysis.costs` or a file of 'hvd profile'
    head           a stated EAGLE3 acceptance; None = no head
    predictors     predictor files in place of the shipped ones
    max_tokens     answer tokens to analyse, about; more are sampled by conversation
    learn          compare with a predictor trained on the logs
    train          where to write that predictor when it helps
    keep_loops     do not cut answers where they begin to loop
    seed           of the sample
    """

    tokenizer: str | None = None
    form: str | None = None
    cost: str = DEFAULT
    head: SimulatedHead | None = None
    predictors: tuple[str, ...] = ()
    max_tokens: int = 150_000
    learn: bool = True
    train: Path | None = None
    keep_loops: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens!r}")
        if self.train is not None and not self.learn:
            raise ConfigError("nothing is trained without the comparison; leave one of the two options out")


def analyze(
    paths: Sequence[str],
    options: AnalyzeOptions,
    progress: Progress = lambda what, done, total: None,
    replayed: Callable[[Analysis], None] = lambda found: None,
) -> Analysis:
    """Analyse logs. ConfigError, ModelError or PredictorError, in one line, when that can't be done.

    replayed   called with all but the training, before that begins: it takes longest
    """
    started = time.perf_counter()
    cost, about_cost = load_cost(options.cost)
    predictors = gather_predictors(options.predictors)
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    reader = LogReader(paths, options.form, lambda done, total: progress("read", done, total))
    sample = read_sample(reader, options)
    encoder = Encoder(tokenizer)
    answers = _encode(encoder, sample, progress)
    if not answers:
        raise ConfigError(_nothing(reader, encoder))
    names = (PLAIN, CACHE, *(("eagle3", "any-match") if options.head else ()), *RULES)
    names = (*names, *(("hvd-paper",) if "scalar" in predictors else ()), HVD)
    players = {name: policy_with(name, list(predictors.values())) for name in names}
    study = Study(players, cost, options.head, best=HVD)
    states = _study(study, answers, options, cost, progress)
    loops = _loops(study, answers, options, cost, list(predictors.values()), progress)
    found = _result(study, reader, sample, encoder, loops, options, about_cost, time.perf_counter() - started)
    replayed(found)
    training = _training(answers, states, predictors.get("survival"), cost, options, progress)
    return replace(found, training=training, seconds=time.perf_counter() - started)


def read_sample(reader: LogReader, options: AnalyzeOptions) -> Reservoir:
    """The reading pass."""
    most = CHARS_PER_TOKEN * options.max_tokens
    sample = Reservoir(most, PROMPT_SHARE * most, options.seed)
    for answer in reader:
        if isinstance(answer, Recorded) and options.tokenizer is None:
            raise ConfigError("these logs are text: give --tokenizer (a hub id, a directory or a .gguf file)")
        sample.add(answer)
    return sample


def _encode(encoder: Encoder, sample: Reservoir, progress: Progress) -> list[Asked]:
    kept = list(sample)
    answers: list[Asked] = []
    for asked in encoder.all(kept):
        answers.append(asked)
        progress("tokenize", len(answers), len(kept))
    return answers


def _study(
    study: Study, answers: Sequence[Asked], options: AnalyzeOptions, cost: CostModel, progress: Progress
) -> StateSet | None:
    """Play everything on everything; the states to train on fall off on the way. None when there are none."""
    total = sum(len(asked.trace.response) for asked in answers)

    def played() -> Iterator[Walk]:
        for asked, walk in walked(answers, keep_loops=options.keep_loops):
            study.add(asked, walk)
            progress("replay", study.tokens, total)
            yield walk

    if not options.learn:
        for _ in played():
            pass
        return None
    try:
        return collect_states(played(), cost, Sampling(total, MOST_STATES, options.seed))
    except ConfigError:  # not one draft in all the logs
        return None


def _loops(
    study: Study,
    answers: Sequence[Asked],
    options: AnalyzeOptions,
    cost: CostModel,
    predictors: Sequence[Predictor],
    progress: Progress,
) -> Loops | None:
    """Speed-ups with the loops left in: answers that loop are played again, whole, in place of their cut selves.

    The other answers' figures stay as they are, though a loop in the cache might have changed them a little.
    """
    if not study.cut:
        return None
    names = (PLAIN, CACHE, HVD)
    sums = {name: sum(t.seconds for t in study.sums[name].values()) for name in names}
    players = {name: policy_with(name, predictors) for name in names}
    tokens = 0
    for done, (asked, walk) in enumerate(walked(answers, keep_loops=True), start=1):
        progress("replay with loops", done, len(answers))
        before = study.cut.get(id(asked))
        if before is None:
            continue
        tokens += len(walk) - (loop_onset(walk.trace.response) or 0)
        for name, policy in players.items():
            whole = Totals()
            play(walk, policy, cost, options.head, whole)
            sums[name] += whole.seconds - before[name]
    return Loops(len(study.cut), tokens, {name: sums[PLAIN] / sums[name] for name in names})


def _training(
    answers: Sequence[Asked],
    states: StateSet | None,
    shipped: Predictor | None,
    cost: CostModel,
    options: AnalyzeOptions,
    progress: Progress,
) -> Training | None:
    """The comparison, and the file when it is wanted and helps."""
    if not options.learn:
        return None
    assert shipped is None or isinstance(shipped, SurvivalPredictor)
    settings = TrainOptions(seed=options.seed, most_states=MOST_STATES, keep_loops=options.keep_loops)
    found = compare(answers, states, shipped, cost, options.head, settings, progress)
    if options.train is None or states is None or found.verdict is not Verdict.YES:
        return found
    predictor = fit_all(states, settings, lambda what, done, total: progress("write the predictor", done, total))
    predictor.metadata.update(
        {
            "models": [RECORDED],
            "tokenizer": answers[0].trace.tokenizer_fingerprint,
            "datasets": sorted(states.datasets),
            "traces": len(answers),
            "tokens": sum(len(asked.trace.response) for asked in answers),
            "suffix": asdict(settings.suffix),
            "shared": True,
        }
    )
    save_predictor(options.train, predictor)
    return replace(found, file=str(options.train))


def _result(
    study: Study,
    reader: LogReader,
    sample: Reservoir,
    encoder: Encoder,
    loops: Loops | None,
    options: AnalyzeOptions,
    about_cost: str,
    seconds: float,
) -> Analysis:
    names = tuple(study.sums)
    cache = policy_report(CACHE, study.sums).total
    head = options.head
    return Analysis(
        files=tuple(reader.tallies),
        tokenizer=options.tokenizer or "of the traces",
        cost=about_cost,
        eagle3=f"stated: a chain of {head.length}, each token right with {head.accept:g}" if head else None,
        answers=study.answers,
        answers_found=sample.answers,
        groups=len(study.groups),
        share=sample.kept_chars / max(1, sample.answer_chars),
        tokens=study.tokens,
        prompt_tokens=study.prompt_tokens,
        looped=len(study.cut),
        cache_share=cache.arms[Arm.CACHE].accepted / cache.tokens if Arm.CACHE in cache.arms else 0.0,
        payoffs=Histogram(EDGES, tuple(study.payoffs), study.bare),
        policies=tuple(policy_report(name, study.sums) for name in names),
        intervals=speedup_intervals(study.groups, names),
        sources=shares(list(study.sources.items())),
        gains=tuple(study.gains),
        loops=loops,
        training=None,
        notes=tuple(_notes(reader, encoder, study)),
        seconds=seconds,
    )


def _notes(reader: LogReader, encoder: Encoder, study: Study) -> Iterator[str]:
    """What readers should know of these figures, one line each."""
    yield from (f"{why.split('; known')[0]}; file left out" for why in reader.skipped[:_NAMED])
    if len(reader.skipped) > _NAMED:
        yield f"{len(reader.skipped)} files in all left out"
    broken, unanswered, repeats = (
        sum(getattr(t, name) for t in reader.tallies) for name in ("broken", "unanswered", "repeats")
    )
    if broken:
        yield f"{counted(broken, 'broken line')} left out"
    if unanswered:
        yield f"{counted(unanswered, 'record')} without a recorded answer (or without its prompt) left out"
    if repeats:
        yield f"{counted(repeats, 'answer')} that an earlier record had already, counted once"
    if encoder.refused:
        yield f"{counted(encoder.refused, 'answer')}: the chat template refused the messages, they were joined plainly"
    if encoder.foreign:
        yield f"{counted(encoder.foreign, 'trace')} of another tokenizer left out"
    if encoder.unreadable:
        yield f"{counted(encoder.unreadable, 'answer')} that can't be encoded left out"
    if len(study.groups) < LEAST_GROUPS:
        yield f"only {counted(len(study.groups), 'conversation')}: intervals say little"


def _nothing(reader: LogReader, encoder: Encoder) -> str:
    """Why there is nothing to replay, and what to do."""
    tallies = reader.tallies
    if not tallies:
        return f"none of {len(reader.skipped)} files is a log: {reader.skipped[0]}"
    if encoder.foreign:
        return f"all {encoder.foreign} traces were written with another tokenizer; leave --tokenizer out or give theirs"
    broken = [tally for tally in tallies if tally.broken and not tally.unanswered]
    if broken and all(tally.broken >= tally.lines for tally in broken):
        return f"nothing could be read: {broken[0].faults[0]}; is --format {broken[0].format} right?"
    if any(tally.format == VLLM for tally in tallies):
        return f"no recorded answers with their prompts in these vLLM logs, so nothing can be replayed; {ADVICE}"
    lines = sum(tally.lines for tally in tallies)
    return (
        f"no recorded answers in {lines} records, so nothing can be replayed: log responses too, "
        "or give conversations that have assistant messages"
    )

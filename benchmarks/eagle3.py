"""What a trained EAGLE3 head drafts: tokens per cycle by category, accepted length by context, chain and tree.

    python benchmarks/eagle3.py --data DIR [--model FILE] [--head DIR] [--split dev] [--limit 6] [--json FILE]

Greedy decoding with the policy `eagle3` on prompts that the head was not trained on (the `dev` split of DIR's sets),
and once plainly as a check: the texts must be equal. Only counts are reported, so a busy machine changes nothing. Trees
cost one pass a branch on the onnx backend; fewer prompts are decoded with them.

Long contexts hold other tasks than short ones. So that the context alone is seen, short prompts are also asked behind a
talk about something else of some 1,600 tokens, and compared with the same prompts asked by themselves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvd import LLM, SamplingParams
from hvd.bench.environment import environment
from hvd.config import Eagle3Config, EngineConfig
from hvd.engine.llm import Completion
from hvd.errors import RequestError
from hvd.traces.conversation import Conversation
from hvd.traces.prompts import Message, Prompt, read_prompts
from hvd.types import Arm, StepRecord

DEFAULT_MODEL = Path("~/.cache/hvd/models/SmolLM2-135M-Instruct.Q4_1.gguf")
SETS = {
    "chat": ("mt_bench", "alpaca_seed", "ifeval", "self_instruct", "mt_bench_101"),
    "coding": ("humaneval", "mbpp", "oss_instruct", "repobench_style"),
    "structured": ("spider_sql", "json_schema", "bfcl_live"),
    "math": ("gsm8k",),
    "summarization": ("cnn_dm",),
    "rag": ("nq_rag",),
    "long": ("hotpotqa_docs", "musique_docs", "gov_report", "commit_edit"),
}
COMPARED = ("chat", "coding", "structured")
CHAIN, TREE = Eagle3Config(min_prob=0.0), Eagle3Config(shape="tree", total=32, depth=6, top_k=4)
TALK, TALK_TOKENS, ALONE = "mt_bench_101", 1600, 512
"""The set that the talk is taken from, its length, and the longest prompts that are asked behind it."""
BUCKETS = ((0, 512), (512, 1500), (1500, 3072))
"""Positions in the cache, for accepted length by context."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One decoded answer."""

    category: str
    shape: str
    id: str
    tokens: int
    cycles: int
    records: list[StepRecord]


def main() -> None:
    options = _options()
    plain = LLM(options.model, weights=options.weights, eagle3="none", config=EngineConfig(policy="plain"))
    answers: list[Answer] = []
    shapes = (
        ("chain", CHAIN, options.limit),
        ("behind", CHAIN, options.behind_limit),
        ("tree", TREE, options.tree_limit),
    )
    for shape, config, limit in shapes:
        if limit < 1:
            continue
        engine = EngineConfig(policy="eagle3", eagle3=config, record=True)
        llm = LLM(options.model, weights=options.weights, eagle3=options.head, config=engine)
        if Arm.EAGLE3 not in llm.drafters:
            sys.exit("eagle3: no head ships for this model; name one with --head")
        talk = _talk(llm, options) if shape == "behind" else []
        for category, prompt in _prompts(options, limit):
            if shape == "behind" and (category not in COMPARED or prompt.dataset == TALK):
                continue
            answers += _decode(llm, plain, category, shape, prompt, options, talk)
            print(f"\r{shape}: {len(answers)} answers", end="", file=sys.stderr, flush=True)
    report = _report(answers)
    _print(report)
    facts = {"model": plain.target.spec.name, "weights": plain.target.spec.weights, "head": options.head,
             "split": options.split, "limit": options.limit, "tree_limit": options.tree_limit,
             "behind_limit": options.behind_limit, "max_tokens": options.max_tokens,
             "chain": asdict(CHAIN), "tree": asdict(TREE)}  # fmt: skip
    line = json.dumps({**facts, **report, "environment": environment()})
    print(line)
    if options.json:
        options.json.write_text(line + "\n")


def _talk(llm: LLM, options: Any) -> list[Message]:
    """Recorded turns, until they are long enough."""
    talk: list[Message] = []
    for prompt in read_prompts(options.data / f"{TALK}.jsonl", split=options.split):
        for turn in prompt.turns:
            talk += [*turn.messages, {"role": "assistant", "content": turn.recorded or ""}]
        if len(llm.chat_prompt(talk)) > TALK_TOKENS:
            return talk
    sys.exit(f"eagle3: {TALK} is too short for a talk of {TALK_TOKENS} tokens")


def _decode(
    llm: LLM, plain: LLM, category: str, shape: str, prompt: Prompt, options: Any, talk: list[Message]
) -> Iterable[Answer]:
    """The first turn of a conversation, twice. Exits when the texts differ, for then nothing here means anything."""
    id_, messages = next(iter(Conversation(prompt)))
    params = SamplingParams(max_tokens=options.max_tokens)
    try:
        if len(llm.chat_prompt(messages)) + options.max_tokens > (ALONE if talk else BUCKETS[-1][1]):
            return
        ids = llm.chat_prompt([*talk, *messages])
        [answer], [check] = llm.generate([ids], params), plain.generate([ids], params)
    except RequestError as error:
        print(f"\n{id_}: {error}; skipped", file=sys.stderr)
        return
    if answer.token_ids != check.token_ids:
        sys.exit(f"\n{id_}: the text differs from plain decoding's")
    yield _answer(category, shape, id_, answer)


def _answer(category: str, shape: str, id_: str, answer: Completion) -> Answer:
    return Answer(category, shape, id_, len(answer.token_ids), answer.stats.cycles, answer.records)


def _prompts(options: Any, limit: int) -> Iterable[tuple[str, Prompt]]:
    for category, names in SETS.items():
        for name in names:
            file = options.data / f"{name}.jsonl"
            for prompt in itertools.islice(read_prompts(file, split=options.split), limit):
                yield category, prompt


def _report(answers: list[Answer]) -> dict[str, Any]:
    """Tokens per cycle by shape and category; of chains, accepted length by context and accuracy by place."""
    groups: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.shape, answer.category].append(answer)
        if answer.category in COMPARED:
            groups[answer.shape, " + ".join(COMPARED)].append(answer)
    rate = {
        shape: {
            category: {
                "answers": len(of),
                "tokens_per_cycle": round(sum(a.tokens for a in of) / sum(a.cycles for a in of), 3),
            }
            for (found, category), of in groups.items()
            if found == shape
        }
        for shape in dict.fromkeys(shape for shape, _ in groups)
    }
    chains = [record for answer in answers if answer.shape == "chain" for record in answer.records]
    return {
        "tokens_per_cycle": rate,
        "by_context": _by_context(chains),
        "behind_a_talk": _behind_a_talk(answers),
        "by_place": _by_place(chains),
    }


def _behind_a_talk(answers: list[Answer]) -> dict[str, Any]:
    """Accepted length of the head's chains on the same prompts, alone and behind the talk."""
    alone, behind = ({a.id: a for a in answers if a.shape == shape} for shape in ("chain", "behind"))
    both = alone.keys() & behind.keys()
    return {
        "prompts": len(both),
        "alone": _accepted(record for id_ in both for record in alone[id_].records),
        "behind": _accepted(record for id_ in both for record in behind[id_].records),
    }


def _accepted(records: Iterable[StepRecord]) -> float | None:
    """Mean accepted length of the head's drafts."""
    lengths = [record.accepted for record in records if record.arm is Arm.EAGLE3]
    return round(sum(lengths) / len(lengths), 3) if lengths else None


def _by_context(records: list[StepRecord]) -> list[dict[str, Any]]:
    found = []
    for low, high in BUCKETS:
        inside = [r for r in records if low <= r.context < high and r.arm is Arm.EAGLE3]
        if inside:
            found.append({"from": low, "to": high, "cycles": len(inside), "accepted_length": _accepted(inside)})
    return found


def _by_place(records: list[StepRecord]) -> list[float]:
    """Share of chains whose token at each place was accepted, given that all before were."""
    whole = [r for r in records if r.arm is Arm.EAGLE3 and r.drafted == CHAIN.chain_length]
    reached = [sum(r.accepted >= k for r in whole) for k in range(CHAIN.chain_length + 1)]
    return [round(reached[k + 1] / max(1, reached[k]), 3) for k in range(CHAIN.chain_length)]


def _print(report: dict[str, Any]) -> None:
    print("\ntokens per cycle")
    for shape, categories in report["tokens_per_cycle"].items():
        for category, row in categories.items():
            print(f"  {shape:6} {category:28} {row['tokens_per_cycle']:6.2f}   {row['answers']:4} answers")
    print("accepted length of a chain by context")
    for row in report["by_context"]:
        print(f"  {row['from']:5} - {row['to']:5} {row['accepted_length']:6.2f}   {row['cycles']:6} cycles")
    talk = report["behind_a_talk"]
    if talk["prompts"]:
        print(f"the same {talk['prompts']} prompts alone {talk['alone']:.2f}, behind a talk {talk['behind']:.2f}")
    print("accepted at each place, given all before:", *report["by_place"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL.expanduser())
    parser.add_argument("--head", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--split", default="dev")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each set, chains")
    parser.add_argument("--tree-limit", type=int, default=2, help="prompts of each set, trees")
    parser.add_argument("--behind-limit", type=int, default=2, help="prompts of each set, chains behind a talk")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

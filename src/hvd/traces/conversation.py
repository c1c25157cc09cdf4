"""A prompt file's conversation, grown turn by turn."""

from __future__ import annotations

from collections.abc import Iterator

from hvd.traces.prompts import Message, Prompt


class Conversation:
    """What has been said so far. `for id, messages in conversation:` - then `answered(text)` before the next turn.

    Ids are the prompt's own, with "#turn0", "#turn1", .. behind it when it has several turns: the part in front of
    the first '#', its group, stays the same.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._messages: list[Message] = []
        self._recorded: str | None = None

    def __iter__(self) -> Iterator[tuple[str, list[Message]]]:
        for id_, turn in zip(turn_ids(self.prompt), self.prompt.turns, strict=True):
            self._messages += turn.messages
            self._recorded = turn.recorded
            yield id_, list(self._messages)

    def answered(self, text: str) -> None:
        """Put the answer into the history: the generated one, or the recorded one where there is one."""
        self._messages.append({"role": "assistant", "content": text if self._recorded is None else self._recorded})


def turn_ids(prompt: Prompt) -> list[str]:
    """One id for each turn of a prompt."""
    if len(prompt.turns) == 1:
        return [prompt.id]
    return [f"{prompt.id}#turn{i}" for i in range(len(prompt.turns))]

"""What users build on: names and signatures. A change here is a change of the public API: say so in the release notes.

`python tests/test_public_api.py` writes the snapshot anew.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import hvd

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def describe() -> str:
    lines = [f"hvd.__all__ = {sorted(hvd.__all__)}"]
    for name in sorted(set(hvd.__all__) - {"__version__"}):
        lines += ["", *_class(name, getattr(hvd, name))]
    return "\n".join(lines) + "\n"


def _class(name: str, cls: type) -> list[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    lines = [f"{name}({bases})" if bases else name]
    if dataclasses.is_dataclass(cls):
        lines += [f"    {field.name}: {field.type}{_default(field)}" for field in dataclasses.fields(cls)]
    elif "__init__" in vars(cls):
        lines.append(f"    __init__{inspect.signature(cls.__init__)}")
    for member, value in sorted(vars(cls).items()):
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            lines.append(f"    {member} -> {inspect.signature(value.fget).return_annotation}")  # type: ignore[arg-type]
        elif isinstance(value, classmethod | staticmethod):
            lines.append(f"    {member}{inspect.signature(value.__func__)}")
        elif inspect.isfunction(value):
            lines.append(f"    {member}{inspect.signature(value)}")
    return lines


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return " = ..." if field.default_factory is not dataclasses.MISSING else ""


def test_names_and_signatures_are_those_of_the_snapshot() -> None:
    assert describe() == SNAPSHOT.read_text("utf-8"), "if the change is meant: python tests/test_public_api.py"


def test_every_public_name_is_documented() -> None:
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    for name in set(hvd.__all__) - {"__version__"}:
        assert getattr(hvd, name).__doc__, name


if __name__ == "__main__":
    SNAPSHOT.write_text(describe(), "utf-8")

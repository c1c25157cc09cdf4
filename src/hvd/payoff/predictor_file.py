"""The file that a predictor is kept in.

b"hvd-predictor\\n"   what it is
sha256 [32]          of everything behind it; nothing is parsed before it agrees
npz                  arrays (no pickle): `header` uint8 [..] = JSON: version, kind, features (version), inputs (names),
                     metadata; the others float32, whatever the kind needs
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd.errors import PredictorError
from hvd.payoff.features import FEATURE_VERSION
from hvd.payoff.files import write_whole
from hvd.types import Float32Array

MAGIC = b"hvd-predictor\n"
VERSION = 1
_DIGEST = hashlib.sha256().digest_size


def write_predictor_file(
    path: Path, kind: str, arrays: Mapping[str, Float32Array], inputs: Sequence[str], metadata: Mapping[str, Any]
) -> None:
    """Write atomically. `metadata` must hold JSON values only."""
    header = {
        "version": VERSION,
        "kind": kind,
        "features": FEATURE_VERSION,
        "inputs": list(inputs),
        "metadata": dict(metadata),
    }
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    write_whole(path, MAGIC + hashlib.sha256(content).digest() + content)


def read_predictor_file(path: Path) -> tuple[str, dict[str, Float32Array], tuple[str, ...], dict[str, Any]]:
    """(kind, arrays, names of the inputs, metadata). PredictorError in one line when the file can't be used."""
    content = _sound_content(path)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop("header").tobytes())
        versions = ("format", header["version"], VERSION), ("feature", header["features"], FEATURE_VERSION)
        for what, found, known in versions:
            if found != known:
                raise PredictorError(f"{path}: {what} version {found}, this program reads {known}; train it again")
        return str(header["kind"]), arrays, tuple(header["inputs"]), dict(header["metadata"])
    except (KeyError, TypeError, ValueError) as error:
        raise PredictorError(f"{path}: its header is incomplete; train it again") from error


def _sound_content(path: Path) -> bytes:
    """The npz part, as it was written."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PredictorError(f"{path}: can't be read ({error.strerror or error})") from error
    if not content.startswith(MAGIC):
        raise PredictorError(f"{path}: not a predictor file; 'hvd train predictor' makes one")
    start = len(MAGIC) + _DIGEST
    if hashlib.sha256(content[start:]).digest() != content[len(MAGIC) : start]:
        raise PredictorError(f"{path}: torn or altered; train it again")
    return content[start:]

"""The file that a predictor is kept in: an npz archive (no pickle) with a JSON header among its arrays.

header   uint8 [..]  JSON: format, version, kind, features (version), inputs (names), metadata
others   float32     whatever the kind needs

A zip archive carries a checksum of every member, so a torn or altered file does not read.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvd.errors import PredictorError
from hvd.payoff.features import FEATURE_VERSION
from hvd.payoff.files import write_whole
from hvd.types import Float32Array

FORMAT = "hvd-predictor"
VERSION = 1


def write_predictor_file(
    path: Path, kind: str, arrays: Mapping[str, Float32Array], inputs: Sequence[str], metadata: Mapping[str, Any]
) -> None:
    """Write atomically. `metadata` must hold JSON values only."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "features": FEATURE_VERSION,
        "inputs": list(inputs),
        "metadata": dict(metadata),
    }
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    write_whole(path, buffer.getvalue())


def read_predictor_file(path: Path) -> tuple[str, dict[str, Float32Array], tuple[str, ...], dict[str, Any]]:
    """(kind, arrays, names of the inputs, metadata). PredictorError in one line when the file can't be used."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop("header").tobytes())
    except OSError as error:
        raise PredictorError(f"{path}: can't be read ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise PredictorError(f"{path}: not a predictor file, or torn; train it again") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise PredictorError(f"{path}: not a predictor file")
    for what, have, want in (
        ("format", header.get("version"), VERSION),
        ("feature", header.get("features"), FEATURE_VERSION),
    ):
        if have != want:
            raise PredictorError(f"{path}: {what} version {have}, this program reads {want}; train it again")
    try:
        return str(header["kind"]), arrays, tuple(header["inputs"]), dict(header["metadata"])
    except (KeyError, TypeError, ValueError) as error:
        raise PredictorError(f"{path}: its header is incomplete; train it again") from error

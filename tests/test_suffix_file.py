"""Saving and loading the suffix cache's responses."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from pathlib import Path

import numpy as np
import pytest

from hvd.config import SuffixConfig
from hvd.drafters import suffix_file
from hvd.drafters.suffix import SuffixDrafter
from hvd.errors import CacheFileError

TEXTS = {"tenant a": [[1, 2, 3, 4, 5], [7, 7, 7]], "": [[9, 8, 7, 6]]}


def drafter(fingerprint: str = "tok", vocab_size: int = 100) -> SuffixDrafter:
    return SuffixDrafter(SuffixConfig(), vocab_size, fingerprint)


def filled() -> SuffixDrafter:
    full = drafter()
    for scope, texts in TEXTS.items():
        for text in texts:
            full.add_response(scope, np.array(text, np.int32))
    return full


def proposal(of: SuffixDrafter, scope: str, prompt: list[int]) -> list[int]:
    of.open(1, scope)
    of.observe(1, np.array(prompt, np.int32), None, prompt=True)
    draft = of.propose(1, 16)
    of.close(1, keep=False)
    return [] if draft is None else draft.tokens.tolist()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cache.bin"
    suffix_file.save(filled(), path)
    return path


def seal(body: bytes) -> bytes:
    """A file that was written so: the checksum is right."""
    return body + hashlib.sha256(body).digest()


def assert_refused(path: Path, of: SuffixDrafter, match: str) -> None:
    before = path.read_bytes()
    with pytest.raises(CacheFileError, match=match) as error:
        suffix_file.load(of, path)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    assert of.stats.responses == 0
    assert of.bytes_used == 0


def test_what_was_saved_is_loaded(path: Path) -> None:
    loaded = drafter()
    assert suffix_file.load(loaded, path) == 3
    assert {name: [text.tolist() for text in texts] for name, texts in loaded.shared} == TEXTS
    assert proposal(loaded, "tenant a", [1, 2]) == [3, 4, 5]
    assert proposal(loaded, "", [9]) == [8, 7, 6]
    assert proposal(loaded, "", [1, 2]) == []


def test_the_file_is_the_owners_and_nothing_else_is_left_behind(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_saving_replaces(path: Path) -> None:
    suffix_file.save(drafter(), path)
    assert suffix_file.load(drafter(), path) == 0


def test_a_failed_save_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        suffix_file.save(drafter(), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_another_tokenizers_file_is_refused(path: Path) -> None:
    assert_refused(path, drafter(fingerprint="other"), "another tokenizer")
    assert_refused(path, drafter(vocab_size=101), "another tokenizer")


def test_every_torn_file_is_refused(path: Path) -> None:
    whole, of = path.read_bytes(), drafter()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert_refused(path, of, "torn|not a suffix cache file")


def test_every_flipped_byte_is_noticed(path: Path) -> None:
    whole, of = bytearray(path.read_bytes()), drafter()
    for i in range(len(whole)):
        whole[i] ^= 0x40
        path.write_bytes(whole)
        assert_refused(path, of, "torn|not a suffix cache file|has format")
        whole[i] ^= 0x40


def test_an_older_format_is_refused(path: Path) -> None:
    body = bytearray(path.read_bytes()[:-32])
    struct.pack_into("<I", body, 8, 0)
    path.write_bytes(seal(bytes(body)))
    assert_refused(path, drafter(), "has format 0")


@pytest.mark.parametrize("token", [-1, 100, 105, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(path: Path, token: int) -> None:
    """K4-09, though the fingerprint is right."""
    body = bytearray(path.read_bytes()[:-32])
    struct.pack_into("<i", body, len(body) - 8, token)
    path.write_bytes(seal(bytes(body)))
    assert_refused(path, drafter(), "outside the vocabulary")


@pytest.mark.parametrize("header", [b"{}", b"[1]", b"no json", b'{"scopes": 3}', b"\xff\xfe", b"[" * 100_000])
def test_a_header_of_another_shape_is_refused(path: Path, header: bytes) -> None:
    path.write_bytes(seal(struct.pack("<8sII", suffix_file.MAGIC, suffix_file.VERSION, len(header)) + header))
    assert_refused(path, drafter(), "understood|another tokenizer")


def test_a_header_that_speaks_of_other_lengths_is_refused(path: Path) -> None:
    path.write_bytes(seal(path.read_bytes()[:-36]))
    assert_refused(path, drafter(), "its header speaks of others")


@pytest.mark.parametrize(
    "lengths",
    [[10**30, 12 - 10**30], [-1, 13], [float("inf")], [float("nan")], ["12"], [12.0], [True] * 12, 12, [2**63]],
)
def test_forged_lengths_are_refused(path: Path, lengths: object) -> None:
    scopes = [{"name": "a", "lengths": lengths}]
    header = json.dumps({"tokenizer": "tok", "vocab_size": 100, "scopes": scopes}).encode()
    body = struct.pack("<8sII", suffix_file.MAGIC, suffix_file.VERSION, len(header)) + header + bytes(4 * 12)
    path.write_bytes(seal(body))
    assert_refused(path, drafter(), "understood|speaks of others")


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    suffix_file.save(filled(), tmp_path / "a" / "b" / "cache.bin")
    assert suffix_file.load(drafter(), tmp_path / "a" / "b" / "cache.bin") == 3


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="can't read"):
        suffix_file.load(drafter(), tmp_path / "none")


def test_loading_keeps_to_the_bound(tmp_path: Path) -> None:
    big = SuffixDrafter(SuffixConfig(), 60_000, "tok")
    rng = np.random.default_rng(0)
    for _ in range(40):
        big.add_response("s", rng.integers(0, 60_000, 1000).astype(np.int32))
    suffix_file.save(big, tmp_path / "big")
    small = SuffixDrafter(SuffixConfig(max_bytes=1024 * 1024), 60_000, "tok")
    assert suffix_file.load(small, tmp_path / "big") == 40
    assert 0 < small.bytes_used <= 1024 * 1024

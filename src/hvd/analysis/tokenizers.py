"""A tokenizer without its model: of a directory, a GGUF file or the hub, and no weights are read or downloaded."""

from __future__ import annotations

from pathlib import Path

from hvd.errors import ModelError
from hvd.models.gguf_file import GGUFFile
from hvd.models.gguf_tokenizer import read_gguf_tokenizer
from hvd.tokenizer import Tokenizer

_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"]


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, its tokenizer.json, a .gguf file or a hub id ("owner/name").

    ModelError, in one line, when there is none.
    """
    if not source.strip():
        raise ModelError("the tokenizer's name is empty; give a directory, a .gguf file or a hub id")
    path = Path(source).expanduser()
    if path.is_dir():
        return Tokenizer.from_directory(path)
    if path.is_file():
        return _of_file(path)
    if source.count("/") == 1 and not source.startswith((".", "/", "~")) and path.suffix not in (".gguf", ".json"):
        return Tokenizer.from_directory(_download(source))
    raise ModelError(
        f"no tokenizer at '{source[:100]}': no such directory or file, and not a hub id; give a directory with "
        "tokenizer.json, a .gguf file or a hub id such as 'owner/name'"
    )


def _of_file(path: Path) -> Tokenizer:
    if path.name == "tokenizer.json":
        return Tokenizer.from_directory(path.parent)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is neither a GGUF file nor a tokenizer.json")
    return read_gguf_tokenizer(GGUFFile(path))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"no tokenizer at '{hub_id}': no such directory, and as a hub id it is neither cached nor reachable "
            f"({reason}); give a directory with tokenizer.json or a .gguf file"
        ) from error

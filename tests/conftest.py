"""Fixtures that many tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import ARCHITECTURES, make_tiny

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_CODER = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out (and count as deselected) the tests marked `cuda` where torch sees no CUDA device."""
    cuda = [item for item in items if item.get_closest_marker("cuda")]
    if cuda and not sys.modules["torch"].cuda.is_available():
        items[:] = [item for item in items if item not in cuda]
        config.hook.pytest_deselected(items=cuda)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model("qwen3", vocab=16, ..)`: the directory of a tiny random model, made once for each set of options."""
    made: dict[str, Path] = {}

    def get(family: str = "llama", **options: Any) -> Path:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = make_tiny(tmp_path_factory.mktemp(family) / family, family, **options)
        return made[key]

    return get


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    """Compiled before the first test: after an install that is announced, where tests look at what is said."""
    from hvd.models.onnx import attention_kernel, linear_kernel
    from hvd.models.onnx.linear import PACKED

    _ = attention_kernel.compute.address, attention_kernel.functions()
    if PACKED:
        _ = linear_kernel.compute.address, linear_kernel.embed.address


@pytest.fixture(scope="session", params=sorted(ARCHITECTURES))
def tiny_family(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    """A tiny model of each family in turn, with default options."""
    return tiny_model(request.param)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """Where the real models lie (HVD_TEST_MODELS); for tests marked `model`."""
    return Path(os.environ.get("HVD_TEST_MODELS", "~/.cache/hvd/models")).expanduser()


@pytest.fixture(scope="session")
def smollm2(models_dir: Path) -> Path:
    """SmolLM2-135M-Instruct, GGUF Q4_1."""
    return _real(models_dir / SMOLLM2)


@pytest.fixture(scope="session")
def qwen_coder(models_dir: Path) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, GGUF Q4_K_M."""
    return _real(models_dir / QWEN_CODER)


def _real(path: Path) -> Path:
    if not path.is_file():
        pytest.fail(f"{path} is missing; scripts/test fetches it, or set HVD_TEST_MODELS to its folder")
    return path

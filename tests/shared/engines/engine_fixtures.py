"""Fixtures shared by engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from model_factory import save_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a random model of some kind, made once."""
    folders: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            save_model(folders[kind], kind)
        return folders[kind]

    return get


@pytest.fixture(scope="session")
def resumes_draws() -> bool:
    """Whether the engine under test samples by (seed, position) alone."""
    return True


@pytest.fixture(scope="session")
def frees_memory_asleep() -> bool:
    """Whether the engine under test frees memory when it sleeps, here."""
    return True


@pytest.fixture(scope="session")
def model_kind() -> str:
    """The kind of model of the engine under test (see model_factory)."""
    return "qwen3"

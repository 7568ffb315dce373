"""Shared set-up: no network, fixed seeds, a cache folder of the test run's own, inference only."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before anything imports torch, diffusers or oxidiff.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SEED = 20240


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a developer's cache holds must not decide whether a test passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    import torch

    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _reset_dynamo() -> Iterator[None]:
    yield
    import torch

    torch._dynamo.reset()


def pytest_report_header() -> list[str]:
    import diffusers
    import torch
    import transformers

    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}"
    return [f"{versions}, {torch.get_num_threads()} threads, seed {SEED}"]

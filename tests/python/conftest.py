"""Shared set-up: no network, fixed seeds, a cache folder of the test run's own, inference only."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

# Before anything imports torch, diffusers or oxidiff.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# More than a hundred processes are started, each of which would compile the package's sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Two test processes share the cores: threads that wait must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SEED = 20240


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer's cache holds, or another test left there, must not decide whether a test passes."""
    monkeypatch.setenv("OXIDIFF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session", autouse=True)
def _libraries_are_not_garbage() -> None:
    """What the libraries hold is there to stay: no collection goes through it."""
    import diffusers.models
    import transformers.models

    import oxidiff

    assert diffusers.models and transformers.models and oxidiff
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def _staying() -> weakref.WeakSet[Any]:
    """The families of modules that an earlier test of this file found to stay: its own fixtures keep them."""
    from oxidiff import family

    if family._families:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    return weakref.WeakSet()


@pytest.fixture(scope="module")
def _suspects() -> weakref.WeakSet[Any]:
    """Families that were still there after one test."""
    return weakref.WeakSet()


@pytest.fixture(autouse=True)
def _nothing_is_left(_staying: weakref.WeakSet[Any], _suspects: weakref.WeakSet[Any]) -> Iterator[None]:
    """A module of an earlier test that is still alive, in a cycle of the library that it came from, would share its
    programs with those of the next test. To look for it takes 0.1 to 0.7 s once tests have imported more: only where there
    is one, and no more among what was found to stay."""
    from oxidiff import family

    if not _staying.issuperset(family._families.values()):
        gc.collect()
        found = {*family._families.values()} - {*_staying}
        # What an exception holds that the runner has not let go of yet, would be kept for ever.
        if found <= {*_suspects}:
            gc.freeze()
            _staying.update(found)
        _suspects.update(found)
    yield


@pytest.fixture(scope="module")
def one_long_capture() -> Iterator[None]:
    """What captures put in the place of methods of modules stays there from one test to the next, as within a capture: for
    files of many small ones, none of which runs Dynamo, which would follow what stands there. With all libraries imported it
    takes 20 ms to put it there and back."""
    from oxidiff.capture.following import following

    with following():
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_report_header() -> list[str]:
    import diffusers
    import torch
    import transformers

    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}, transformers {transformers.__version__}"
    return [f"{versions}, {torch.get_num_threads()} threads, seed {SEED}"]

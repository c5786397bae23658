"""A cache of the Hugging Face hub with one model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def keep_model(monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, folder: Path) -> None:
    """Copies a folder there under a model's name, and has it be the cache that is looked in."""
    kept = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, kept / "snapshots" / ("a" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40, encoding="ascii")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

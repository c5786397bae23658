"""A pager refuses a snapshot that is not its own, and always says which field differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpager import FingerprintMismatchError, Layout, Pager, PagerConfig

LAYOUT = Layout(layers=1, kv_heads=1, k_dim=16, v_dim=16, chunk_tokens=16)


def make(layout: Layout = LAYOUT, fingerprint: str = "a", **options: Any) -> Pager:
    config = PagerConfig(pool_tokens=64, chunk_tokens=16, host_bytes="1MiB", **options)
    return Pager(layout, config, rows=16, fingerprint={"model": fingerprint}, threads=1)


@pytest.fixture(params=[5, 40], ids=["tail only", "sealed chunks"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kv = np.random.default_rng(0).standard_normal((1, request.param, 1, 16), dtype=np.float32)
    sequence = make().sequence(salt="tenant")
    sequence.append(np.arange(request.param), kv, kv)
    sequence.save(tmp_path / "turn.kvsnap")
    return tmp_path / "turn.kvsnap"


@pytest.mark.parametrize(
    ("field", "pager", "salt"),
    [
        ("salt", {}, "other"),
        ("scorer", {"scorer": "mean"}, "tenant"),
        ("layout", {"layout": Layout(1, 1, 32, 16, chunk_tokens=16)}, "tenant"),
        ("model", {"fingerprint": "b"}, "tenant"),
    ],
)
def test_another_salt_scorer_layout_or_model_is_refused_by_name(
    saved: Path, field: str, pager: dict[str, Any], salt: str
) -> None:
    other = make(**pager)
    before = other.stats()
    with pytest.raises(FingerprintMismatchError) as refused:
        other.restore(other.open_snapshot(saved), salt=salt)
    assert refused.value.field == field
    assert other.stats() == before
    other.check_invariants()

"""What vLLM's K/V depend on: every field makes another identity, and nothing else does."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpager.connectors.identity import (
    adapter_digest,
    as_json,
    differences,
    digest_of,
    file_digest,
    weights_digests,
)
from kvpager.connectors.vllm_identity import identity_of
from kvpager.errors import InvalidArgumentError


@dataclass(frozen=True)
class Spec:
    block_size: int
    num_kv_heads: int
    dtype: torch.dtype
    sliding_window: int | None = None


class Config:
    """Of a Hugging Face model."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


class Engine:
    """vLLM's configuration objects, as far as they are read."""

    def __init__(self, folder: Path) -> None:
        self.model = SimpleNamespace(
            model=str(folder),
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            max_model_len=4096,
            hf_config=Config(
                {
                    "num_hidden_layers": 4,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                    "_name_or_path": str(folder),
                    "transformers_version": "5.19.0",
                }
            ),
            multimodal_config=None,
            using_transformers_backend=lambda: False,
        )
        self.cache = SimpleNamespace(
            block_size=16,
            cache_dtype="auto",
            kv_cache_layout="LBHNC",
            prefix_caching_hash_algo="sha256",
        )
        self.parallel = SimpleNamespace(
            world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0
        )
        self.group = SimpleNamespace(
            layer_names=("layers.0", "layers.1"), tokens_per_block=16, group_id=0
        )
        self.spec = Spec(16, 2, torch.bfloat16)
        self.offloading = SimpleNamespace(
            groups=[self.group],
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
            model=SimpleNamespace(dtype="bfloat16"),
            parallel=self.parallel,
            worker_kv_bytes_per_block=1024,
            kv_cache_layout="LBHNC",
            canonical_layout=False,
            replicated_layout=False,
        )
        self.load = SimpleNamespace(load_format="auto", download_dir=None)
        self.lora: Any = None
        self.speculative: Any = None
        self.version = "0.32.0"
        self.device = "NVIDIA H200"
        self.weights: str | None = None

    def identity(self) -> dict[str, Any]:
        config = SimpleNamespace(
            model_config=self.model,
            cache_config=self.cache,
            load_config=self.load,
            lora_config=self.lora,
            speculative_config=self.speculative,
        )
        kv_cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=self.spec)])
        return identity_of(
            config,
            kv_cache,
            self.offloading,
            version=self.version,
            device=self.device,
            weights=self.weights,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for number in (1, 2):
        (path / f"model-{number}.safetensors").write_bytes(bytes([number]) * 1000)
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine(folder)


def rotated(engine: Engine, **rope: Any) -> None:
    engine.model.hf_config.fields["rope_parameters"] = rope


def draft(engine: Engine, folder: Path) -> Any:
    model = SimpleNamespace(**{**vars(engine.model), "model": str(folder)})
    return SimpleNamespace(method="eagle", num_speculative_tokens=3, draft_model_config=model)


CHANGES: dict[str, Callable[[Engine], Any]] = {
    "engine": lambda e: setattr(e, "version", "0.33.1"),
    "device": lambda e: setattr(e, "device", "NVIDIA A100"),
    "model.dtype": lambda e: setattr(e.model, "dtype", torch.float16),
    "model.revision": lambda e: setattr(e.model, "revision", "main"),
    "model.quantization": lambda e: setattr(e.model, "quantization", "fp8"),
    "config.num_hidden_layers": lambda e: e.model.hf_config.fields.update(num_hidden_layers=5),
    "config.rope_parameters.rope_theta": lambda e: rotated(e, rope_type="default", rope_theta=2e4),
    "cache.cache_dtype": lambda e: setattr(e.cache, "cache_dtype", "fp8"),
    "cache.kv_cache_layout": lambda e: setattr(e.cache, "kv_cache_layout", "LBNHC"),
    "chunk.layout": lambda e: setattr(e.offloading, "kv_cache_layout", "LBNHC"),
    "chunk.dtype": lambda e: setattr(e.offloading.model, "dtype", "fp8"),
    "chunk.blocks": lambda e: setattr(e.offloading.cache, "blocks_per_chunk", 4),
    "chunk.tokens_per_hash": lambda e: setattr(e.offloading.cache, "tokens_per_hash", 8),
    "chunk.canonical": lambda e: setattr(e.offloading, "canonical_layout", True),
    "parallel.tp_size": lambda e: setattr(e.parallel, "tp_size", 2),
    "parallel.rank": lambda e: setattr(e.parallel, "rank", 1),
    "parallel.dcp_size": lambda e: setattr(e.parallel, "dcp_size", 2),
    "groups.0.spec.sliding_window": lambda e: setattr(e, "spec", Spec(16, 2, torch.bfloat16, 128)),
    "groups.0.spec.num_kv_heads": lambda e: setattr(e, "spec", Spec(16, 1, torch.bfloat16)),
    "groups.0.spec.dtype": lambda e: setattr(e, "spec", Spec(16, 2, torch.float16)),
    "groups.0.layers.1": lambda e: setattr(e.group, "layer_names", ("layers.0", "layers.2")),
    "groups.0.tokens_per_block": lambda e: setattr(e.group, "tokens_per_block", 32),
    "hash.algorithm": lambda e: setattr(e.cache, "prefix_caching_hash_algo", "sha256_cbor"),
    "lora.lora_dtype": lambda e: setattr(e, "lora", SimpleNamespace(lora_dtype="auto")),
    "speculative.method": lambda e: setattr(e, "speculative", SimpleNamespace(method="ngram")),
    "weights.named": lambda e: setattr(e, "weights", "checkpoint 7"),
}


@pytest.mark.parametrize(("field", "change"), CHANGES.items(), ids=CHANGES.keys())
def test_every_field_makes_another_identity_and_is_named(engine, field, change):
    before = engine.identity()
    change(engine)
    after = engine.identity()
    assert digest_of(before) != digest_of(after)
    names = [line.partition(":")[0] for line in differences(before, after)]
    assert field in names


def test_an_identity_is_json_and_the_same_for_the_same_engine(folder):
    one, other = Engine(folder).identity(), Engine(folder).identity()
    assert one == other == json.loads(json.dumps(one))
    assert differences(one, other) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.model.hf_config.fields.update(_name_or_path="moved"),
        lambda e: e.model.hf_config.fields.update(transformers_version="5.20.0"),
        lambda e: setattr(e, "version", "0.32.4"),
        lambda e: setattr(e.model, "max_model_len", 8192),
    ],
    ids=["path", "transformers", "patch release", "largest length"],
)
def test_what_k_and_v_do_not_depend_on_makes_no_other_identity(engine, change):
    before = engine.identity()
    change(engine)
    assert engine.identity() == before


def test_the_largest_length_counts_where_positions_are_scaled(engine):
    rotated(engine, rope_type="longrope", rope_theta=1e4)
    before = engine.identity()
    engine.model.max_model_len = 8192
    assert differences(before, engine.identity()) == [
        "config.vllm_max_model_len: 4096, now 8192",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"type": "yarn"}},
        {"text_config": {"rope_parameters": {"sliding": {"rope_type": "llama3"}}}},
    ],
)
def test_scaled_positions_are_found_wherever_the_configuration_has_them(engine, fields):
    engine.model.hf_config.fields.update(fields)
    assert engine.identity()["config"]["vllm_max_model_len"] == 4096


def test_a_seed_of_hashes_counts(engine, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = engine.identity()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert differences(before, engine.identity()) == ['hash.seed: null, now "7"']


def test_the_release_of_transformers_counts_where_its_code_of_the_model_runs(engine, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.20.0")
    before = engine.identity()
    engine.model.using_transformers_backend = lambda: True
    after = engine.identity()
    assert differences(before, after) == ['code: "vllm", now "transformers 5.20.0"']
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "5.21.0")
    (line,) = differences(after, engine.identity())
    assert line == 'code: "transformers 5.20.0", now "transformers 5.21.0"'


def test_a_draft_models_weights_count(engine, tmp_path, folder):
    other = tmp_path / "draft"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"one")
    engine.speculative = draft(engine, other)
    before = engine.identity()
    (other / "model.safetensors").write_bytes(b"two")
    (line,) = differences(before, engine.identity())
    assert line.startswith("speculative.weights.model.safetensors: ")


def test_scales_that_are_computed_at_run_time_are_refused(engine):
    engine.cache.calculate_kv_scales = True
    with pytest.raises(InvalidArgumentError, match="calculate_kv_scales is True"):
        engine.identity()


def test_weights_that_are_no_files_have_to_be_named(engine):
    engine.load.load_format = "tensorizer"
    with pytest.raises(InvalidArgumentError, match=r'load_format is .tensorizer.*"weights"'):
        engine.identity()
    engine.weights = "checkpoint 7"
    assert engine.identity()["weights"] == {"named": "checkpoint 7"}


# Files.


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPAGER_CACHE", str(folder))
    return folder


def test_all_files_of_weights_count_and_no_others(folder):
    before = weights_digests(str(folder))
    assert sorted(before) == ["model-1.safetensors", "model-2.safetensors"]
    (folder / "config.json").write_text('{"other": 1}')
    assert weights_digests(str(folder)) == before
    (folder / "model-2.safetensors").write_bytes(b"other")
    second = weights_digests(str(folder))
    assert second != before
    (folder / "consolidated.pth").write_bytes(b"which `--load-format pt` loads")
    assert weights_digests(str(folder)) == {
        **second,
        "consolidated.pth": file_digest(folder / "consolidated.pth"),
    }


@pytest.mark.parametrize(
    "name", ["modeling_own.py", "hf_quant_config.json", "quantize_config.json"]
)
def test_code_and_quantisation_beside_weights_count(engine, folder, name):
    (folder / name).write_text("one")
    before = engine.identity()
    (folder / name).write_text("two")
    (line,) = differences(before, engine.identity())
    assert line.startswith(f"weights.{name}: ")


def test_a_model_without_weights_here_is_named(tmp_path):
    with pytest.raises(InvalidArgumentError, match="model is 'nobody/nothing'"):
        weights_digests("nobody/nothing")
    with pytest.raises(InvalidArgumentError, match="files of weights on this machine"):
        weights_digests(str(tmp_path))


def test_a_file_is_hashed_once(folder, remembered, monkeypatch):
    path = folder / "model-1.safetensors"
    first = file_digest(path)

    def refuse(**_: Any) -> Any:
        raise AssertionError("hashed again")

    monkeypatch.setattr("kvpager.connectors.identity.blake3", refuse)
    assert file_digest(path) == first


def test_a_file_that_changed_is_hashed_again_though_size_and_time_are_as_they_were(
    folder, remembered
):
    path = folder / "model-1.safetensors"
    status = path.stat()
    first = file_digest(path)
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert file_digest(path) != first


def test_an_adapters_weights_and_configuration_count(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match="adapter is "):
        adapter_digest(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    first = adapter_digest(str(tmp_path))
    assert len(first) == 32
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 8}')
    second = adapter_digest(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    assert len({first, second, adapter_digest(str(tmp_path))}) == 3


# JSON and comparisons.


def test_values_of_configuration_are_json_without_addresses():
    class Odd:
        pass

    value = {"b": torch.float16, "a": (1, {3, 2}), "c": float("inf"), "d": Odd(), "e": len}
    found = as_json(value)
    assert list(found) == ["a", "b", "c", "d", "e"]
    assert found["a"] == [1, [2, 3]]
    assert found["b"] == "torch.float16"
    assert found["c"] == "inf"
    assert found["d"] == as_json({"d": Odd()})["d"]
    assert found["e"] == "builtins.len"


def test_differences_name_what_is_new_and_what_is_gone():
    before = {"a": 1, "b": {"c": [1, 2], "d": {}}}
    now = {"a": 1, "b": {"c": [1, 3, 4]}, "e": "x"}
    assert differences(before, now) == [
        "b.c.1: 2, now 3",
        "b.c.2: absent, now 4",
        "b.d: {}, now absent",
        'e: absent, now "x"',
    ]


def test_many_differences_are_counted():
    lines = differences({}, {str(number): number for number in range(100)})
    assert len(lines) == 21
    assert lines[-1] == "and 80 more"

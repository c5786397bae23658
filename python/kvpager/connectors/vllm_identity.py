"""The identity of vLLM's K/V: fields of its configuration objects. Imports nothing of vLLM."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpager._support.arguments import refusal
from kvpager.connectors.identity import as_json, of_the_model, weights_digests

FORMAT = 1  # another one where what is hashed, or how chunks are stored, changes

# Ways to load that read files of weights from the model's folder, and nothing else.
_FROM_FILES = frozenset(
    (
        *("auto", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt"),
        *("runai_streamer", "safetensors", "sharded_state"),
    )
)
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
_CACHE = (
    "block_size",
    "cache_dtype",
    "kv_cache_layout",
    "kv_cache_dtype_skip_layers",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
)
_MODEL = (
    "revision",
    "code_revision",
    "dtype",
    "quantization",
    "quantization_config",
    "disable_sliding_window",
    "model_impl",
    "model_class_overrides",
)
_PARALLEL = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "rank")
_LORA = ("lora_dtype", "fully_sharded_loras", "target_modules", "default_mm_loras")
_MULTIMODAL = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
)
_SPECULATIVE = ("method", "num_speculative_tokens", "parallel_drafting", "kv_cache_dtype")


def identity_of(
    config: Any,
    kv_cache: Any,
    offloading: Any,
    *,
    version: str,
    device: str,
    weights: str | None = None,
) -> dict[str, Any]:
    """Returns everything that the bytes of an engine's K/V chunks depend on, as JSON.

    Args:
        config: its `VllmConfig`.
        kv_cache: its `KVCacheConfig`.
        offloading: the `OffloadingConfig` that vLLM makes of both.
        version: of vLLM; patch releases of one minor release share K/V.
        device: name of the device that computes.
        weights: what identifies the weights, instead of digests of their files.

    Raises:
        InvalidArgumentError: nothing can identify the weights, or the scales of the K/V are
            computed at run time.
    """
    model, cache = config.model_config, config.cache_config
    if getattr(cache, "calculate_kv_scales", False):
        raise refusal("calculate_kv_scales", True, "False: scales are not stored with the K/V")
    identity = {
        "format": FORMAT,
        "engine": "vllm " + ".".join(version.split(".")[:2]),
        "device": _device(device),
        "weights": _weights(model, config.load_config, weights),
        "config": _config(model),
        "model": _some(model, _MODEL),
        "code": _code(model),
        "cache": _some(cache, _CACHE),
        "groups": [
            {
                "layers": list(group.layer_names),
                "tokens_per_block": group.tokens_per_block,
                "spec": kv_cache.kv_cache_groups[group.group_id].kv_cache_spec,
            }
            for group in offloading.groups
        ],
        "chunk": {
            "tokens_per_hash": offloading.cache.tokens_per_hash,
            "blocks": offloading.cache.blocks_per_chunk,
            "worker_bytes_per_block": offloading.worker_kv_bytes_per_block,
            "dtype": offloading.model.dtype,
            "layout": offloading.kv_cache_layout,
            "canonical": offloading.canonical_layout,
            "replicated": offloading.replicated_layout,
        },
        "parallel": _some(offloading.parallel, _PARALLEL),
        "hash": _hash(cache),
        "attention": {
            "backend": getattr(getattr(config, "attention_config", None), "backend", None),
            "environment": os.environ.get("VLLM_ATTENTION_BACKEND"),
        },
        "speculative": _speculative(getattr(config, "speculative_config", None), config),
        "lora": _optional(getattr(config, "lora_config", None), _LORA),
        "multimodal": _optional(getattr(model, "multimodal_config", None), _MULTIMODAL),
    }
    found: dict[str, Any] = as_json(identity)
    return found


def _weights(model: Any, load: Any, named: str | None) -> dict[str, str]:
    if named is not None:
        return {"named": named}
    way = str(getattr(load.load_format, "value", load.load_format))
    if way == "dummy":
        return {"dummy": "vLLM's own seed"}
    if way not in _FROM_FILES:
        expected = f'one of {", ".join(sorted(_FROM_FILES))}, or "weights" in the connector\'s'
        raise refusal("load_format", way, f"{expected} configuration, which identifies them")
    where = getattr(model, "model_weights", "") or model.model
    return weights_digests(where, model.revision, load.download_dir)


def _code(model: Any) -> str:
    """Whose code of the model runs; transformers is installed apart from vLLM."""
    if model.using_transformers_backend():
        return f"transformers {importlib.metadata.version('transformers')}"
    return "vllm"


def _config(model: Any) -> dict[str, Any]:
    """The model's configuration after overrides; its largest length where positions use it."""
    kept = of_the_model(model.hf_config.to_dict())
    if any(kind not in (None, "default") for kind in _rotations(kept)):
        kept["vllm_max_model_len"] = model.max_model_len
    return kept


def _rotations(value: Mapping[str, Any], inside: bool = False) -> Iterator[Any]:
    """The kinds of rotary embeddings of a configuration, also of its parts and layer types."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _rotations(item, inside or name.startswith("rope"))
        elif inside and name in ("rope_type", "type"):
            yield item


def _hash(cache: Any) -> dict[str, Any]:
    return {
        "algorithm": cache.prefix_caching_hash_algo,
        "seed": os.environ.get("PYTHONHASHSEED"),
    }


def _speculative(config: Any, engine: Any) -> dict[str, Any] | None:
    """What drafts' K/V depend on, which lie in the same chunks."""
    if config is None:
        return None
    draft = getattr(config, "draft_model_config", None)
    found = _some(config, _SPECULATIVE)
    if draft is not None and draft.model != engine.model_config.model:
        load = getattr(config, "draft_load_config", None) or engine.load_config
        found |= {"weights": _weights(draft, load, None), "config": _config(draft)}
        found |= {"model": _some(draft, _MODEL)}
    return found


def _device(name: str) -> str:
    """On a CPU the layout of K/V depends on the model and its instruction sets."""
    if name != "cpu":
        return name
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    sets = [one for one in _INSTRUCTION_SETS if one in fields.get("flags", "").split()]
    return " ".join([fields.get("model name", platform.machine()), *sets])


def _some(found: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(found, name, None) for name in names}


def _optional(found: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    return None if found is None else _some(found, names)

"""Every format that is tried: which library makes it, and how transformers loads it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from quantisation_table.packed import write_packed

_HF: Any = transformers  # many of its classes have no types
_INT4: Any = vars(torch)["int4"]


@dataclass(frozen=True)
class Case:
    """One way to quantise a model.

    Attributes:
        library: the name of its distribution.
        format: what becomes of weights, and of activations if they are quantised too.
        loaded: how a user gets such a model.
        load: makes one of the plain model in a folder.
        dtype: of the model.
    """

    library: str
    format: str
    loaded: str
    load: Callable[[Path, torch.dtype], Any]
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """Tells it from the others."""
        return f"{self.library}: {self.format}, {str(self.dtype).removeprefix('torch.')}"


def _configured(config: Callable[[], Any], **options: Any) -> Callable[[Path, torch.dtype], Any]:
    """Loads with a quantization_config, which is only made where its library is installed."""

    def load(folder: Path, dtype: torch.dtype) -> Any:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, quantization_config=config(), **options
        )
        return model.eval()

    return load


def _torchao(config: Callable[[Any], Any]) -> Callable[[Path, torch.dtype], Any]:
    def made() -> Any:
        return _HF.TorchAoConfig(config(importlib.import_module("torchao.quantization")))

    return _configured(made)


def _int4(packing: str, ao: Any) -> Any:
    return ao.Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing)


def _bitsandbytes(**options: Any) -> Callable[[Path, torch.dtype], Any]:
    return _configured(lambda: _HF.BitsAndBytesConfig(**options), device_map="cpu")


def _adapted(folder: Path, dtype: torch.dtype) -> Any:
    """QLoRA: adapters on a base of four bits."""
    import peft

    base = _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )(folder, dtype)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(base, config).eval()


def _checkpoint(method: str, folder: Path, dtype: torch.dtype) -> Any:
    """A checkpoint of the method, packed here, as transformers loads it."""
    packed = folder.parent / method
    if not packed.is_dir():
        write_packed(folder, packed, method)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        packed, dtype=dtype, device_map="cpu"
    )
    return model.eval()


_AO = "TorchAoConfig"
_BNB = "BitsAndBytesConfig"
_HALF = torch.bfloat16

CASES = (
    Case("torchao", "int8 weights", _AO, _torchao(lambda ao: ao.Int8WeightOnlyConfig())),
    Case("torchao", "int8 weights", _AO, _torchao(lambda ao: ao.Int8WeightOnlyConfig()), _HALF),
    Case(
        "torchao",
        "int8 weights and activations, a scale per token",
        _AO,
        _torchao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig()),
        _HALF,
    ),
    Case(
        "torchao",
        "int8 weights and activations, a scale per tensor",
        _AO,
        _torchao(lambda ao: ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor())),
    ),
    Case(
        "torchao",
        "int4 weights in groups of 32 (Intx)",
        _AO,
        _torchao(
            lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=ao.PerGroup(32))
        ),
    ),
    Case(
        "torchao",
        "int4 weights in groups of 32, int8 activations per token (8da4w)",
        _AO,
        _torchao(
            lambda ao: ao.Int8DynamicActivationIntxWeightConfig(
                weight_dtype=_INT4, weight_granularity=ao.PerGroup(32)
            )
        ),
    ),
    Case("torchao", "float8 weights", _AO, _torchao(lambda ao: ao.Float8WeightOnlyConfig())),
    Case(
        "torchao",
        "float8 weights and activations per row",
        _AO,
        _torchao(lambda ao: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())),
        _HALF,
    ),
    *(
        Case(
            "torchao",
            f"int4 weights, packed as {packing}",
            _AO,
            _torchao(partial(_int4, packing)),
            _HALF,
        )
        for packing in ("plain", "tile_packed_to_4d")
    ),
    *(
        Case(
            "bitsandbytes",
            kind + (", scales quantised too" if double else ""),
            _BNB + ', device_map="cpu"',
            _bitsandbytes(
                load_in_4bit=True,
                bnb_4bit_quant_type=kind,
                bnb_4bit_use_double_quant=double,
                bnb_4bit_compute_dtype=dtype,
            ),
            dtype,
        )
        for kind, double, dtype in (
            ("nf4", False, torch.float32),
            ("nf4", True, _HALF),
            ("fp4", False, _HALF),
        )
    ),
    Case(
        "bitsandbytes",
        "LLM.int8(), outliers above 6",
        _BNB + ', device_map="cpu"',
        _bitsandbytes(load_in_8bit=True),
        _HALF,
    ),
    Case(
        "bitsandbytes",
        "LLM.int8(), llm_int8_threshold=0",
        _BNB + ', device_map="cpu"',
        _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
        _HALF,
    ),
    Case(
        "bitsandbytes",
        "nf4, with LoRA adapters (QLoRA)",
        "peft.get_peft_model of that",
        _adapted,
        torch.float32,
    ),
    *(
        Case(
            "optimum-quanto",
            f"{bits} weights",
            "QuantoConfig",
            _configured(partial(_HF.QuantoConfig, weights=bits)),
        )
        for bits in ("int8", "int4", "float8")
    ),
    *(
        Case(
            "gptqmodel",
            f"{method.upper()}, 4 bits in groups of 32",
            'from_pretrained(..., device_map="cpu")',
            partial(_checkpoint, method),
            dtype,
        )
        for method, dtype in (
            ("gptq", torch.float16),
            ("gptq", _HALF),
            ("awq", torch.float16),
        )
    ),
    Case(
        "hqq",
        "4 bits in groups of 64",
        'HqqConfig, device_map="cpu"',
        _configured(lambda: _HF.HqqConfig(nbits=4, group_size=64), device_map="cpu"),
    ),
)

"""Checkpoints of 4 bits as GPTQ and AWQ write them, made of a plain one by rounding alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GROUP = 32  # rows of a weight [in, out] that share a scale and a zero point
_IN_WORD = 8  # codes of 4 bits in a word of 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_packed(plain: Path, folder: Path, method: str) -> None:
    """Writes a checkpoint of `method`, "gptq" or "awq", of the one in `plain`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix("weight")
            packed = _gptq(weight) if method == "gptq" else _awq(weight)
            tensors |= {stem + part: tensor for part, tensor in packed.items()}
        else:
            tensors[name] = weight.half()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["dtype"] = "float16"
    config["quantization_config"] = {"bits": 4, "group_size": GROUP, "quant_method": method}
    config["quantization_config"] |= (
        {"desc_act": False, "sym": False, "checkpoint_format": "gptq"}
        if method == "gptq"
        else {"zero_point": True, "version": "gemm"}
    )
    (folder / "config.json").write_text(json.dumps(config))


def _gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scales, zeros = _rounded(weight)
    by_rows = codes.view(-1, _IN_WORD, codes.shape[1]).transpose(1, 2)
    return {
        "qweight": _words(by_rows),
        "qzeros": _words((zeros - 1).view(len(zeros), -1, _IN_WORD)),
        "scales": scales.half(),
        "g_idx": (torch.arange(len(codes)) // GROUP).to(torch.int32),
    }


def _awq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scales, zeros = _rounded(weight)
    return {
        "qweight": _words(codes.view(len(codes), -1, _IN_WORD), _AWQ_ORDER),
        "qzeros": _words(zeros.view(len(zeros), -1, _IN_WORD), _AWQ_ORDER),
        "scales": scales.half(),
    }


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [in, out], scales and zero points [in / GROUP, out] of a weight [out, in]."""
    columns = weight.float().t().contiguous()
    grouped = columns.view(-1, GROUP, columns.shape[1])
    least, most = grouped.amin(1), grouped.amax(1)
    scales = ((most - least) / 15).clamp_min(1e-6)
    zeros = (-least / scales).round().clamp(1, 15)
    codes = (grouped / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    return codes.view(columns.shape).long(), scales, zeros.long()


def _words(codes: torch.Tensor, order: Sequence[int] = range(_IN_WORD)) -> torch.Tensor:
    """[a, b] int32 of codes [a, b, 8]."""
    words = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for place, code in enumerate(order):
        words |= codes[..., code] << (4 * place)
    return words.where(words < 2**31, words - 2**32).to(torch.int32).contiguous()

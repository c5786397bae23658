"""Tries one format: an engine, a conversation, its file in another process, a bit of a weight."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import kvpager
from kvpager._model.weights.digests import weights_digest
from kvpager._model.weights.held import held_by, is_quantised
from kvpager.errors import UnsupportedModelError
from quantisation_table.cases import CASES, Case

PROMPT = [*range(3, 152)]
_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}


def save_plain(folder: Path) -> None:
    """The model that every case quantises."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SHAPE)).save_pretrained(folder)


def first(case: Case, folder: Path) -> dict[str, Any]:
    """Opens an engine, checks decoding against a prefill, saves, and notes what comes next."""
    told: dict[str, Any] = {"version": _version(case.library)}
    if not told["version"]:
        return {**told, "verdict": "not installed", "reason": ""}
    try:
        model = case.load(folder / "plain", case.dtype)
    except Exception as error:  # whatever a library raises is what is told
        return {**told, "verdict": "not loaded", "reason": _shortened(error)}
    try:
        engine = kvpager.Engine(model, pool_tokens=2048)
    except UnsupportedModelError as error:
        return {**told, "verdict": "refused", "reason": _shortened(error)}
    with engine:
        told["rows"] = engine.row_counts.describe()
        session = engine.session()
        session.prefill(PROMPT)
        begun = session.generate(20, logprobs=True)
        assert begun.logprobs is not None
        score = engine.score([*PROMPT, *begun.tokens.tolist()])
        if score.against(begun.logprobs).differing:
            return {**told, "verdict": "differs", "reason": "decoding is not a prefill's"}
        session.save(folder / "turn.kvp")
        then = session.generate(20, logprobs=True)
        assert then.logprobs is not None
        told["then"] = [then.tokens.tolist(), then.logprobs.tobytes().hex()]
    return {**told, "verdict": "taken", "reason": ""}


def second(case: Case, folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    """Goes on from the file in this process, and changes a bit of each tensor of a weight."""
    model = case.load(folder / "plain", case.dtype)
    with kvpager.Engine(model, pool_tokens=2048) as engine:
        found = engine.restore(folder / "turn.kvp").generate(20, logprobs=True)
    assert found.logprobs is not None
    if [found.tokens.tolist(), found.logprobs.tobytes().hex()] != told["then"]:
        return {**told, "verdict": "differs", "reason": "a restored session went on otherwise"}
    before = weights_digest(model)
    layer = next(name for name, module in model.named_modules() if is_quantised(module))
    for name, tensor in held_by(model).tensors:
        if name.startswith(f"{layer}.") and tensor.numel():
            raw = tensor.data.as_subclass(torch.Tensor).reshape(-1).view(torch.uint8)
            raw[-1] ^= 1
            if weights_digest(model) == before:
                return {**told, "verdict": "differs", "reason": f"the digest misses {name}"}
            raw[-1] ^= 1
    return told


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _shortened(error: Exception) -> str:
    """The reason without the model's name; of a library's traceback the last line."""
    text = str(error).replace("LlamaForCausalLM: ", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:400]


def main() -> None:
    """`trial.py first|second NUMBER FOLDER`: prints a line of JSON."""
    step, number, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(2)
    case = CASES[number]
    if step == "first":
        told = first(case, folder)
    else:
        told = second(case, folder, json.loads((folder / "told.json").read_text()))
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

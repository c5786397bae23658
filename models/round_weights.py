"""Writes a model's folder again with every weight rounded to bfloat16: half the bytes.

    python models/round_weights.py TRAINED models/tiny-retriever

The rounded model is loaded as its configuration says, in float32; its weights then have zeros for
their last sixteen bits.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a model again with every weight rounded to bfloat16."
    )
    parser.add_argument("model", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("output", type=Path, help="the folder to write, which must not exist")
    args = parser.parse_args()
    if not (args.model / "model.safetensors").is_file():
        parser.error(f"{args.model}: no model.safetensors there")
    if args.output.exists():
        parser.error(f"{args.output}: it is there already")
    args.output.mkdir(parents=True)
    for file in args.model.glob("*.json"):
        shutil.copyfile(file, args.output / file.name)
    weights = load_file(args.model / "model.safetensors")
    rounded = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    written = args.output / "model.safetensors"
    save_file(rounded, written, metadata={"format": "pt"})
    written.chmod(0o644)


if __name__ == "__main__":
    main()

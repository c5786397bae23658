"""Makes docs/architectures.md and .json: what kvpager does with every text architecture.

    python scripts/architectures.py --kept FILE  # all, about an hour; goes on from FILE
    python scripts/architectures.py llama doge   # some: prints them, writes nothing

Every architecture of transformers' AutoModelForCausalLM is built tiny, with random weights, in a
process of its own with a time limit, and opened in an engine; what is accepted is compared with
transformers beyond its windows, and verified.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from architecture_table.classify import DTYPES, ERROR, Row, classify, one_line
from architecture_table.page import DOCS, page, text_architectures

_IN_OTHER_DTYPES = ("verdict", "options", "reason")
_SECONDS = 180  # an architecture may take


def main() -> int:
    """Returns the exit code: 1 if any architecture is wrong, or ends with a raw exception."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; by default all, into docs/")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--kept", type=Path, help="file of rows that are known, and are added")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    kept = _read(arguments.kept)
    for name in arguments.names or text_architectures():
        for dtype in arguments.dtypes:
            if (name, dtype) in kept:
                continue
            start = time.monotonic()
            row = kept[name, dtype] = in_a_process(name, dtype)
            seconds = time.monotonic() - start
            said = f"{row.options} {row.reason or row.figures}"
            print(f"{name:24} {dtype:8} {row.verdict:18} {seconds:5.1f} s  {said}", flush=True)
            if arguments.kept is not None:
                with arguments.kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([name, dtype, row.to_json()]) + "\n")
    if not arguments.names:
        told = {"transformers": transformers.__version__, "architectures": _table(kept)}
        (DOCS / "architectures.json").write_text(
            json.dumps(told, indent=1) + "\n", encoding="utf-8"
        )
        (DOCS / "architectures.md").write_text(page(told), encoding="utf-8")
    return int(any(row.verdict in ("WRONG", ERROR) for row in kept.values()))


def _read(path: Path | None) -> dict[tuple[str, str], Row]:
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(name, dtype): Row(**row) for name, dtype, row in lines}


def _table(rows: Mapping[tuple[str, str], Row]) -> list[dict[str, Any]]:
    """The rows in float32, each with what it is in other dtypes, where that was tried."""
    first, *others = DTYPES
    return [
        {
            **rows[name, first].to_json(),
            **{
                dtype: {key: getattr(rows[name, dtype], key) for key in _IN_OTHER_DTYPES}
                for dtype in others
                if (name, dtype) in rows
            },
        }
        for name in text_architectures()
    ]


def in_a_process(name: str, dtype: str) -> Row:
    """`classify` in a process that is ended when it takes too long; torch is loaded once."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_tell, args=(theirs, name, dtype))
    child.start()
    theirs.close()
    try:
        if not ours.poll(_SECONDS):
            return Row(name, "", ERROR, reason=f"not done after {_SECONDS} seconds")
        row: Row = ours.recv()
    except EOFError:
        child.join()
        return Row(name, "", ERROR, reason=f"its process ended with {child.exitcode}")
    else:
        return row
    finally:
        child.kill()
        child.join()


def _tell(pipe: Any, name: str, dtype: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what transformers warns of
    try:
        pipe.send(classify(name, dtype))
    except Exception as error:
        pipe.send(Row(name, "", ERROR, reason=one_line(f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    sys.exit(main())

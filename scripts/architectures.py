"""Makes docs/architectures.md and .json: what kvpager does with every text architecture.

    python scripts/architectures.py             # all, about half an hour on one core
    python scripts/architectures.py llama doge  # some: prints them, writes nothing

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
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from architecture_table.classify import ERROR, Row, classify, one_line
from architecture_table.page import DOCS, page, text_architectures

_SECONDS = 180  # an architecture may take


def main() -> int:
    """Returns the exit code: 1 if any architecture is wrong, or ends with a raw exception."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; by default all, into docs/")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    rows = []
    for name in arguments.names or text_architectures():
        start = time.monotonic()
        row = in_a_process(name)
        rows.append(row)
        seconds = time.monotonic() - start
        said = f"{row.options} {row.reason or row.figures}"
        print(f"{name:24} {row.verdict:18} {seconds:5.1f} s  {said}", flush=True)
    if not arguments.names:
        told: dict[str, Any] = {"transformers": transformers.__version__}
        told["architectures"] = [row.to_json() for row in rows]
        (DOCS / "architectures.json").write_text(
            json.dumps(told, indent=1) + "\n", encoding="utf-8"
        )
        (DOCS / "architectures.md").write_text(page(told), encoding="utf-8")
    return int(any(row.verdict in ("WRONG", ERROR) for row in rows))


def in_a_process(name: str) -> Row:
    """`classify` in a process that is ended when it takes too long; torch is loaded once."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_tell, args=(theirs, name))
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


def _tell(pipe: Any, name: str) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what transformers warns of
    try:
        pipe.send(classify(name))
    except Exception as error:
        pipe.send(Row(name, "", ERROR, reason=one_line(f"{type(error).__name__}: {error}")))


if __name__ == "__main__":
    sys.exit(main())

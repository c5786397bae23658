"""The second part of `kvpager demo`: a conversation about a document, with a model that answers.

Three processes: the first reads the document and answers three questions, the second restores that
and answers another, and the third holds the same conversation without an interruption.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvpager._support.children import ChildError, run_children, serve
from kvpager._support.words import byte_size, counted, duration
from kvpager.cli.failure import CliError
from kvpager.cli.models import INSTALL, load_model, load_tokenizer, packaged_model
from kvpager.cli.options import read_text
from kvpager.cli.output import note
from kvpager.cli.terminal import Look

if TYPE_CHECKING:
    from kvpager import Engine, Session

_POOL_TOKENS = 512
_SYSTEM = "You are a helpful assistant."
# Small models answer these; the penalty keeps them from saying one thing over and over.
_QUESTIONS = (
    "According to the text, what does kvpager keep in a pool of fixed size?",
    "What does the text say about snapshots?",
    "What does `make test` do?",
    "Who can read snapshots?",
)
_OPTIONS: dict[str, Any] = {"temperature": 0, "frequency_penalty": 0.4}
_ANSWER_TOKENS = 40
_MODULE = "kvpager.cli.demo_talk"


def talk(args: argparse.Namespace) -> dict[str, Any]:
    """Holds the conversation; returns the result, JSON-able, with "left_out" if it cannot be held.

    Raises:
        CliError: it failed, or --document cannot be read.
    """
    document = _document(args.document)
    model = packaged_model()
    if model is None:
        return {"left_out": f"there is no model that answers; {INSTALL}"}
    if importlib.util.find_spec("gguf") is None and model.suffix == ".gguf":
        return {"left_out": f"{model.name} needs gguf; pip install 'kvpager[gguf]'"}
    with tempfile.TemporaryDirectory(prefix="kvpager-talk-") as workdir:
        job = {
            "model": str(model),
            "document": document,
            "threads": args.threads,
            "quiet": args.quiet,
            "workdir": workdir,
        }
        note(args, f"conversation: {model.stem} reads a document and answers three questions")
        begun = run_part("conversation", {**job, "part": "begin"})
        note(args, "conversation: a new process restores it and answers another question")
        resumed = run_part("conversation, restored", {**job, "part": "resume"})
        note(args, "conversation: the same one without an interruption, bits compared")
        whole = run_part("conversation, uninterrupted", {**job, "part": "whole"})
    return {
        "model": str(model),
        "turns": [*begun.pop("turns"), *resumed.pop("turns")],
        **begun,
        **resumed,
        **whole,
    }


def talk_lines(shown: Look, values: dict[str, Any]) -> Iterator[str]:
    """What a person reads of the result of `talk`."""
    yield ""
    if "left_out" in values:
        yield f"The conversation was left out: {values['left_out']}."
        return
    turns = values["turns"]
    yield (
        f"{Path(values['model']).stem} about kvpager's README, "
        f"{values['tokens']:,} tokens through a pool of {values['pool_tokens']:,}"
    )
    for number, turn in enumerate(turns):
        if number == len(turns) - 1:
            yield (
                f"--- saved ({byte_size(values['saved_bytes'])}); a new process restores "
                f"{counted(values['restored_tokens'], 'token')} in {duration(values['restore_s'])}"
            )
        yield f"> {turn['question']}"
        for paragraph in turn["answer"].splitlines():
            yield from textwrap.wrap(paragraph, shown.width) or [""]
        yield (
            f"  ({turn['computed_tokens']:,} of {counted(turn['prompt_tokens'], 'prompt token')} "
            f"computed, first token after {duration(turn['first_token_s'])})"
        )
    last = turns[-1]
    facts = [
        (
            "prefill of the document",
            f"kvpager {duration(turns[0]['first_token_s'])}, "
            f"transformers {duration(values['transformers_document_s'])}",
        ),
        (
            "the last question",
            f"kvpager, restored: {duration(values['restore_s'] + last['first_token_s'])}; "
            f"transformers, from the beginning: {duration(values['transformers_whole_s'])}",
        ),
        (
            "differing bits",
            f"{values['differing_bits']:,} of {values['compared_bits']:,} (K/V and logits, against "
            "the conversation without an interruption, all of it in the pool)",
        ),
    ]
    yield from shown.fields(facts, 24)
    if values["differing_bits"]:
        yield f"FAILED: the first difference is at {values['first_difference']}"


def run_part(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Runs a part in a fresh process. Raises CliError, which names it."""
    try:
        workdir = Path(job["workdir"])
        (part,) = run_children(_MODULE, [({}, job)], workdir, shown=not job["quiet"])
    except ChildError as error:
        raise CliError(f"{name}: {error}") from error
    return dict(part)


def work(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs a part, with all imports that take time."""
    from kvpager import Engine

    pool: int | Literal["auto"] = "auto" if job["part"] == "whole" else _POOL_TOKENS
    part = {"begin": _begin, "resume": _resume, "whole": _whole}[job["part"]]
    model, tokenizer = load_model(job["model"]), load_tokenizer(job["model"])
    threads = job["threads"]
    with Engine(model, tokenizer=tokenizer, pool_tokens=pool, threads=threads) as engine:
        return part(engine, job)


def _begin(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    session = engine.session()
    turns = [_ask(session, job, number) for number in range(len(_QUESTIONS) - 1)]
    saved = session.save(_snapshot(job, "begun"))
    return {
        "pool_tokens": engine.config.pool_size,
        "turns": turns,
        "saved_bytes": saved.bytes_written,
    }


def _resume(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import save_file

    start = time.perf_counter()
    session = engine.restore(_snapshot(job, "begun"))
    restore_s = time.perf_counter() - start
    turns = [_ask(session, job, len(_QUESTIONS) - 1)]
    session.save(_snapshot(job, "resumed"))
    save_file({"logits": session.logits}, _snapshot(job, "logits"))
    return {"restored_tokens": session.restored_tokens, "restore_s": restore_s, "turns": turns}


def _whole(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    from safetensors.torch import load_file

    from kvpager.cli.demo_part import compare_kv
    from kvpager.verify.bits import compare_bits

    session = engine.session()
    prompts = []
    for number in range(len(_QUESTIONS)):
        asked = _ask(session, job, number)
        prompts.append(session.tokens[: asked["prompt_tokens"]])
    logits = load_file(_snapshot(job, "logits"))["logits"]
    found = compare_bits(logits, session.logits, "logits after the last answer")
    found += compare_kv(engine, session.sequence, _snapshot(job, "resumed"), "conversation")
    return {
        "tokens": session.length,
        "compared_bits": found.bits,
        "differing_bits": found.differing_bits + (not found.same and not found.differing_bits),
        "first_difference": None if found.first is None else str(found.first),
        "transformers_document_s": _transformers_s(engine.model, prompts[0]),
        "transformers_whole_s": _transformers_s(engine.model, prompts[-1]),
    }


def _ask(session: Session, job: dict[str, Any], number: int) -> dict[str, Any]:
    """Asks a question; the first comes with the document."""
    question = _QUESTIONS[number]
    messages: Any = question
    if number == 0:
        document = f"Here is a text.\n\n{job['document']}\n\n{question}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": document}]
    before, start = session.tokens_computed, time.perf_counter()
    stream = session.chat(messages, _ANSWER_TOKENS, stream=True, **_OPTIONS)
    prompt, computed = session.length, session.tokens_computed - before
    pieces = [next(stream, "")]
    first_token_s = time.perf_counter() - start
    pieces += stream
    assert stream.completion is not None
    is_cut = stream.completion.finish_reason == "length"
    return {
        "question": question,
        "answer": "".join(pieces).strip() + (" ..." if is_cut else ""),
        "prompt_tokens": prompt,
        "computed_tokens": computed,
        "first_token_s": first_token_s,
    }


def _transformers_s(model: Any, ids: Any) -> float:
    """Seconds that transformers takes for a prompt up to its first token."""
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        model(torch.tensor(ids, dtype=torch.int64)[None], use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


def _document(path: str | None) -> str:
    """The text of --document, or kvpager's README as prose. Raises CliError."""
    if path is not None:
        return read_text("--document", path)
    readme = Path(__file__).parents[3] / "README.md"  # of a checkout
    if readme.is_file():
        text = readme.read_text(encoding="utf-8")
    else:
        text = str(importlib.metadata.metadata("kvpager")["Description"])
    text = text.partition("\n## Documentation")[0]
    code, picture, row, link = r"```.*?^```", r"!\[.*?\)", r"\|.*?", r"\[[^\]]*\]\([^)]*\)\."
    lines = rf"^({code}|{picture}|{row}|{link})$"
    text = re.sub(lines, "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|[*`\[\]]|^#+ ", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _snapshot(job: dict[str, Any], name: str) -> Path:
    return Path(job["workdir"]) / f"{name}.kvsnap"


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], work))

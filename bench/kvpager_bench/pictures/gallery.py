"""Which pictures there are, and the drawing of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpager_bench.pictures import quality, speed, whereabouts
from kvpager_bench.report import Report


@dataclass(frozen=True)
class Picture:
    """A picture of one report.

    name: of the file, without its ending. heading: of its part of a page. title: the message, from
    the report's figures. shows: what is drawn, for who cannot see it. note: what has to be known
    beside it, with settings of the report in braces.
    """

    name: str
    report: str
    heading: str
    title: Callable[[Report], str]
    draw: Callable[[Report], Any]
    shows: str
    note: str

    def message(self, report: Report) -> str:
        """The title on one line."""
        return " ".join(self.title(report).split())

    def alt(self, report: Report) -> str:
        return f"{self.message(report)}. {self.shows}"

    def told_beside(self, report: Report) -> str:
        return self.note.format(**report.settings)

    def source(self, report: Report) -> str:
        """What a file of this picture was drawn from; it changes with any figure or the title."""
        told = json.dumps([report.to_json(), self.title(report)], sort_keys=True)
        return f"{report.name} {hashlib.sha256(told.encode()).hexdigest()[:16]}"


PICTURES = (
    Picture(
        "turn-cost",
        "warm",
        "What a turn costs",
        speed.turn_title,
        speed.draw_turn,
        "Time to the first token against the context, both logarithmic, for prefills and for what "
        "was restored.",
        "A fresh process has imported, loaded the model and made the engine; the clock runs from "
        "the look-up of the file to the first token. The model is the shipped one of "
        "{layers[shipped]} layers, in float32; the same of a larger shape is in the table above.",
    ),
    Picture(
        "long-texts",
        "long_texts",
        "How costs grow to a million tokens",
        speed.long_title,
        speed.draw_long,
        "Times of what a turn does against the context, both logarithmic: forward after a restore, "
        "save, decode, search, restore, append and fork.",
        "Pager and store alone: K/V of four layers and two heads of 64 in bfloat16, random. What "
        "grows is the scan of a selection among all chunks, and what has a row for each chunk: a "
        "manifest, a table of a forward, the tokens whose hashes are searched.",
    ),
    Picture(
        "decode-speed",
        "decode",
        "How fast it decodes",
        speed.decode_title,
        speed.draw_decode,
        "Tokens per second against the context, both logarithmic: a line for selection, full "
        "attention, and each peer.",
        "{layers} layers of a Qwen3 shape of hidden size 1024, bfloat16, random weights and random "
        "K/V. 4K tokens: sinks, recent window and the {chunks} selected chunks together.",
    ),
    Picture(
        "decode-on-a-cpu",
        "linear_model",
        "How near decoding on a CPU is to its memory",
        speed.model_title,
        speed.draw_model,
        "Bars of tokens per second for each dtype: kvpager, kvpager without parts, and peers; a "
        "line where reading the weights once a token would be.",
        "A model of the shape of Qwen3-0.6B, random weights, behind a prompt of {prompt} tokens.",
    ),
    Picture(
        "quality",
        "quality",
        "What is found with a part of the cache",
        quality.quality_title,
        quality.draw_quality,
        "Needles found against the share of the cache that attention reads, a line per policy; "
        "policies that found the same share a line.",
        "{needles} needles in a document, for each of two retrieval models of 0.5M parameters: one "
        "whose keys were trained to be easy to select by, and one whose keys were not. The oracle "
        "scores all keys; a press drops what it does not keep, kvpager drops nothing.",
    ),
    Picture(
        "kv-formats",
        "quality_formats",
        "What K/V in fewer bits cost",
        quality.formats_title,
        quality.draw_formats,
        "Mean KL divergence from K/V in the model's dtype against the context, both logarithmic: a "
        "line per format, dashed for other systems, each beside its own cache without codes.",
        "A language model of Python ({model}), on modules that it was not trained on; the last "
        "{scored} tokens of a window. All formats, with a part of the context read, and needles: "
        "[kv_formats.md](kv_formats.md).",
    ),
    Picture(
        "residency",
        "residency",
        "Where a conversation's chunks live",
        whereabouts.residency_title,
        whereabouts.draw_residency,
        "Position in the conversation against the tokens read and the questions answered; colours "
        "say whether a chunk is in the pool, in host memory or on disk, circles which one has the "
        "answer.",
        "A document of {context} tokens with needles, through a pool of {pool_tokens} tokens and "
        "host memory for {host_tokens}, copies of what is in the pool included; then questions in "
        "no order. Where a chunk is changes no bit.",
    ),
    Picture(
        "exactness",
        "exactness",
        "What exactness is worth",
        quality.exactness_title,
        quality.draw_exactness,
        "Bars for each model and dtype: logits that differ from one prefill of the same tokens.",
        "Greedy texts of {new_tokens} tokens after {prompts} prompts.",
    ),
    Picture(
        "packing",
        "packing",
        "Many sessions at once",
        speed.packing_title,
        speed.draw_packing,
        "Generated tokens per second against the number of sessions.",
        "Prompts of {mixed_tokens[0]} to {mixed_tokens[1]} tokens, forwards of {rows} rows; the "
        "bits of a session do not depend on the others in its forwards.",
    ),
    Picture(
        "rewards",
        "training_rewards",
        "What a policy learns",
        speed.rewards_title,
        speed.draw_rewards,
        "Mean reward against the step, a line per trainer.",
        "{steps} steps of GRPO on a tiny model in bfloat16: the same weights, prompts and seeds at "
        "the beginning, rollouts by kvpager.",
    ),
    Picture(
        "segments",
        "segments",
        "Documents in any order",
        quality.segments_title,
        quality.draw_segments,
        "Right answers against the share of tokens computed again, a line per policy.",
        "Answers are in another document than the one that the question names; all policies, and "
        "times, are in [segments.md](segments.md).",
    ),
)


def picture_of(report: str) -> Picture:
    """The picture of a report that has one."""
    return next(picture for picture in PICTURES if picture.report == report)


def draw_all(reports: Mapping[str, Report], folder: Path, suffix: str) -> list[str]:
    """Draws each picture whose report is there; returns the names of the files."""
    from kvpager_bench.pictures.canvas import save

    names = []
    for picture in PICTURES:
        report = reports.get(picture.report)
        if report is not None:
            names.append(f"{picture.name}{suffix}.png")
            save(picture.draw(report), folder / names[-1], picture.source(report))
    return names

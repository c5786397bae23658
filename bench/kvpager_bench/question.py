"""The questions: what each asks, how long it takes, which peers it measures.

Nothing here imports a question, so that they can be listed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "kvpager_bench.questions"
SUITE_MINUTES = 40  # what the questions of the suite may take together, on two cores


@dataclass(frozen=True)
class Question:
    """One module of `kvpager_bench.questions`.

    asks: one line. minutes: of its standard size on two quiet cores. peers: which it measures too,
    as its table names them, without versions. reports: the files it writes, without size or
    ending. in_suite: whether `make bench` asks it. needs: what it takes beside time. published: the
    options with which what the documentation shows was measured.
    """

    name: str
    asks: str
    minutes: float
    peers: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    in_suite: bool = False
    needs: str = ""
    published: str = ""


QUESTIONS = {
    question.name: question
    for question in (
        Question(
            "attention",
            "how near attention comes to the machine's bandwidth and arithmetic",
            3,
            ("memory bandwidth", "torch SDPA"),
            ("attention",),
            in_suite=True,
        ),
        Question(
            "selection",
            "how fast chunks are scored and picked",
            2,
            ("memory bandwidth",),
            ("selection",),
            in_suite=True,
        ),
        Question(
            "decode",
            "what a token costs as the context grows, split into its parts",
            5,
            ("transformers", "llama.cpp"),
            ("decode",),
            in_suite=True,
        ),
        Question(
            "linear",
            "what linear layers cost with kvpager's own products, alone and in a whole model",
            10,
            ("torch", "memory bandwidth", "transformers", "llama.cpp"),
            ("linear", "linear_model"),
            needs="7 GB of memory",
        ),
        Question(
            "codes",
            "what keys and values in fewer bits save: time of attention, bytes",
            0.3,
            ("K/V in bfloat16", "memory bandwidth"),
            ("codes",),
            in_suite=True,
        ),
        Question(
            "warm",
            "how long a saved turn takes to answer again in a fresh process",
            5,
            ("transformers", "safetensors", "torch.save", "llama.cpp", "LMCache"),
            ("warm", "warm_state"),
            in_suite=True,
        ),
        Question(
            "snapshot",
            "how fast a session is saved, verified and restored; bytes read",
            4,
            ("memcpy", "dd", "safetensors", "torch.save"),
            ("snapshot_save", "snapshot_read"),
            in_suite=True,
        ),
        Question(
            "paging",
            "how fast chunks move between pool, host and disk",
            0.5,
            ("memcpy",),
            ("paging", "paging_seal"),
            in_suite=True,
        ),
        Question(
            "bookkeeping",
            "what a chunk operation costs beside moving its bytes",
            0.5,
            ("vLLM",),
            ("bookkeeping",),
            in_suite=True,
        ),
        Question(
            "quality",
            "what is found with a part of the cache",
            3,
            ("oracle", "sliding window", "kvpress"),
            ("quality", "quality_formats", "quality_needles"),
            in_suite=True,
            published="--parts budgets,formats,needles",
        ),
        Question(
            "overhead",
            "what the engine adds to the bare forwards of the same model",
            2,
            ("bare forward", "transformers"),
            ("overhead", "overhead_warm"),
            in_suite=True,
        ),
        Question(
            "dense_pool",
            "what a small pool costs dense attention; bits compared",
            1,
            ("transformers",),
            ("dense_pool",),
            in_suite=True,
        ),
        Question(
            "speculation",
            "tokens per forward and per second with speculation; bits compared",
            2,
            ("plain decode", "the same without a draft"),
            ("speculation",),
            in_suite=True,
        ),
        Question(
            "companions",
            "what passes over a long prefix cost when a draft model's trims are refused",
            4,
            ("wiping both caches",),
            ("companions", "companions_reset"),
            in_suite=True,
        ),
        Question(
            "hybrid",
            "what recurrent layers cost a text that is cut: tokens, bytes; bits compared",
            1,
            ("a forward of one chunk", "least recently used"),
            ("hybrid", "hybrid_cost", "hybrid_budget"),
            in_suite=True,
        ),
        Question(
            "segments",
            "what repairing stitched documents is worth; first token over cached documents",
            5,
            ("full prefill", "prefix caching", "seam tail"),
            ("segments", "segments_first_token"),
            in_suite=True,
            published="--prompts 200 --lengths 4096,16384",
        ),
        Question(
            "plan",
            "does the model on paper predict what was measured?",
            0.5,
            (),
            ("plan",),
            in_suite=True,
        ),
        Question(
            "needles",
            "which scorer finds the needles, on trained and on hard keys",
            35,
            ("full attention", "oracle", "sliding window"),
            ("needles",),
            needs="restartable",
        ),
        Question(
            "exactness",
            "what exactness is worth: forks and differing bits",
            5,
            ("transformers",),
            ("exactness",),
        ),
        Question(
            "exact_cost",
            "what exactness costs: decode, prefill and start by M, dtype and mode",
            6,
            ("transformers",),
            ("exact_cost",),
        ),
        Question(
            "experts",
            "a mixture of experts on a CPU: decode and prefill by how its experts run",
            4,
            ("transformers",),
            ("experts",),
        ),
        Question(
            "packing",
            "tokens per second as sessions fill the rows, and beyond",
            10,
            ("transformers",),
            ("packing",),
        ),
        Question(
            "serving",
            "tokens per second over HTTP, and what HTTP costs",
            15,
            ("transformers serve", "vLLM"),
            ("serving", "serving_overhead", "serving_soak"),
        ),
        Question(
            "residency",
            "where the chunks of a conversation are, moment by moment",
            0.5,
            (),
            ("residency",),
            in_suite=True,
        ),
        Question(
            "residency_traffic",
            "bytes across a link by unit of residency",
            4,
            (),
            ("residency_traffic",),
        ),
        Question(
            "store",
            "what a directory store shares; look-up and gc as it fills",
            3,
            (),
            ("store_turns", "store_catalogue"),
        ),
        Question(
            "save_beside",
            "what a save costs the session that goes on decoding",
            1,
            (),
            ("save_beside",),
        ),
    )
}

# Reports of programs that are no questions, and what runs those.
PROGRAMS = {
    "profile": "python -m kvpager_bench.profile",
    "profile_moving": "python -m kvpager_bench.profile",
    "verify_all": "make verify-all",
}


def command_of(report: str) -> str:
    """What measures a report, as it was measured for the documentation."""
    for question in QUESTIONS.values():
        if report in question.reports:
            options = f" -- {question.published}" if question.published else ""
            return f"kvpager bench {question.name}{options}"
    return PROGRAMS[report]


def suite() -> tuple[Question, ...]:
    """What `make bench` asks, in that order."""
    return tuple(question for question in QUESTIONS.values() if question.in_suite)

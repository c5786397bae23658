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
    ending; by default one of its own name. in_suite: whether `make bench` asks it. published: the
    options with which what the documentation shows was measured.
    """

    name: str
    asks: str
    minutes: float
    peers: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    in_suite: bool = True
    published: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reports", self.reports or (self.name,))


_MEMORY, _STOCK, _LLAMA = "memory bandwidth", "transformers", "llama.cpp"
_ALL = (
    Question(
        "attention",
        "how near attention comes to the machine's bandwidth and arithmetic",
        3,
        (_MEMORY, "torch SDPA"),
    ),
    Question(
        "decode",
        "what a token costs as the context grows, split into its parts",
        5,
        (_STOCK, _LLAMA),
    ),
    Question(
        "linear",
        "what linear layers cost with kvpager's own products, alone and in a whole model",
        10,
        ("torch", _MEMORY, _STOCK, _LLAMA),
        ("linear", "linear_model"),
        in_suite=False,
    ),
    Question(
        "codes",
        "what keys and values in fewer bits save: time of attention, bytes",
        0.3,
        ("K/V in bfloat16", _MEMORY),
    ),
    Question(
        "warm",
        "how long a saved turn takes to answer again in a fresh process",
        5,
        (_STOCK, "safetensors", "torch.save", _LLAMA),
    ),
    Question(
        "snapshot",
        "how fast a session is saved, verified and restored; bytes read",
        4,
        ("memcpy", "safetensors", "torch.save"),
        ("snapshot_save", "snapshot_read"),
    ),
    Question(
        "store",
        "what a store's calls and its server cost as it fills",
        30,
        ("the same with fewer snapshots",),
        ("store", "store_server", "store_writers"),
        in_suite=False,
        published="--sizes 10,1000,100000",
    ),
    Question(
        "object_store",
        "what a store in a bucket reads and uploads, and what its calls cost as it fills",
        15,
        ("prefill", "the same with fewer snapshots"),
        ("object_store_turns", "object_store_calls"),
        in_suite=False,
    ),
    Question(
        "chunk_store",
        "what a store of other engines' blocks reads and writes, and what its check costs",
        2,
        ("pread", "write and fsync", "the same with fewer blocks"),
        ("chunk_store", "chunk_store_puts", "chunk_store_calls"),
        in_suite=False,
    ),
    Question(
        "quality",
        "what is found with a part of the cache",
        3,
        ("sliding window", "kvpress"),
    ),
    Question(
        "formats",
        "what K/V in fewer bits cost in the quality of a language model",
        30,
        ("K/V in the model's dtype",),
        ("quality_formats",),
        in_suite=False,
    ),
    Question(
        "overhead",
        "what the engine adds to the bare forwards of the same model",
        2,
        ("bare forward", _STOCK),
    ),
    Question(
        "profile",
        "where the time of prefill, decode, seal, page, save and restore goes",
        1,
        ("a copy in memory",),
        ("profile", "profile_moving"),
    ),
    Question(
        "speculation",
        "tokens per forward and per second with speculation; bits compared",
        2,
        ("plain decode", "the same without a draft"),
    ),
    Question(
        "segments",
        "how soon the first token comes over cached documents in a new order",
        2,
        ("full prefill", "prefix caching"),
        ("segments_first_token",),
        published="--lengths 4096,16384",
    ),
    Question(
        "exactness",
        "what exactness is worth: forks and differing bits",
        5,
        (_STOCK,),
        in_suite=False,
    ),
    Question(
        "packing",
        "tokens per second as sessions fill the rows, and beyond",
        10,
        (_STOCK,),
        in_suite=False,
    ),
    Question(
        "serving",
        "tokens per second over HTTP, and what HTTP costs",
        15,
        ("transformers serve", "vLLM"),
        ("serving", "serving_overhead", "serving_turns"),
        in_suite=False,
    ),
    Question(
        "training",
        "whether a trainer has the rollout's log-probabilities, and what its policy learns",
        10,
        (_STOCK,),
        ("training", "training_rewards"),
        in_suite=False,
    ),
    Question(
        "training_cost",
        "what a training step with the rollout's bits costs, in time and memory",
        25,
        (_STOCK,),
        in_suite=False,
    ),
    Question(
        "alone",
        "what one conversation with a small real model costs",
        25,
        (_STOCK, "vLLM", _LLAMA),
        in_suite=False,
        published="--contexts 128,4096",
    ),
    Question(
        "long_texts",
        "what a turn costs as its text grows to a million tokens",
        3,
        ("the same at 32K",),
        in_suite=False,
    ),
    Question(
        "million",
        "whether a model goes on with a text of a million tokens that memory can't hold",
        20,
        in_suite=False,
        published="--contexts 1048576",
    ),
    Question(
        "bounds",
        "how much of a selection's scan exact bounds could leave out",
        3,
        in_suite=False,
    ),
    Question(
        "replicas",
        "what two servers of one store do for conversations, by routing; and when one fails",
        15,
        ("a store each",),
        ("replicas_routing", "replicas_faults"),
        in_suite=False,
    ),
    Question(
        "simulation",
        "what 4 to 64 replicas would do: a simulation with measured rates",
        1,
        in_suite=False,
    ),
)
QUESTIONS = {question.name: question for question in _ALL}
PROGRAMS = {"verify_all": "make verify-all"}  # reports of programs that are no questions
# Reports of questions that are answered and asked no more, and what relies on them.
SETTLED = {
    "needles": "design/01",
    "residency_traffic": "design/09",
    "quality_needles": "kv_formats.md",
    "segments": "design/13",
    "companions": "companions.md",
    "hybrid_cost": "companions.md",
    "exact_cost": "exactness.md",
    "experts": "design/04",
    "warm_state": "README.md",
    "residency": "how_to/pool_and_selection.md",
}
REPORTS = (*(name for question in _ALL for name in question.reports), *PROGRAMS, *SETTLED)


def origin_of(report: str, release: str) -> str:
    """Markdown: the command that measures a report as it is published, or what a settled one is."""
    for question in _ALL:
        if report in question.reports:
            options = f" -- {question.published}" if question.published else ""
            return f"`kvpager bench {question.name}{options}`"
    if report in PROGRAMS:
        return f"`{PROGRAMS[report]}`"
    return f"release {release} (settled: {SETTLED[report]})"


def suite() -> tuple[Question, ...]:
    """What `make bench` asks, in that order."""
    return tuple(question for question in _ALL if question.in_suite)

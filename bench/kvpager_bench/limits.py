"""What limits the figures that miss their aim, with the measurement that shows it."""

from __future__ import annotations

# By report: words of a missed figure, and its limit. The first words that it contains count.
_LIMITS: dict[str, tuple[tuple[str, str], ...]] = {
    "attention": (
        (
            "",
            "arithmetic with AVX2: the same kernel with AVX-512 reaches 0.82 with 16/8/128 "
            "([note 2](design/02-cpu-attention.md))",
        ),
    ),
    "codes": (
        ("decode attention", "as of attention: integers are multiplied in 16 bits with AVX2"),
        (
            "bytes of a saved text",
            "summaries are as large as of bfloat16, and are an eighth of a saved text in q8 "
            "([note 14](design/14-kv-codes.md))",
        ),
    ),
    "snapshot_read": (
        (
            "encrypted",
            "AES-GCM itself, which decrypts 2.4 GB/s with one thread and with two, as it holds the "
            "interpreter's lock ([note 11](design/11-snapshots-and-stores.md))",
        ),
        ("verifying", "the disk's rate: the other rows reach 0.93 to 1.19 of it"),
        (
            "open and restore",
            "every name of a text is computed again, and every chunk gets a record: 12 us for a "
            "thousand tokens",
        ),
    ),
    "object_store_calls": (
        ("entries", "a bucket lists all names, whichever are asked for; S3 has no other order"),
    ),
    "chunk_store": (("the check", "XXH3-128 reads each byte once more, from the cache"),),
    "long_texts": (
        (
            "decode: ",
            "every row scores every chunk: no exact bound of chunks leaves one out on a real "
            "model's keys (`bounds`, [note 1](design/01-selection-and-residency.md))",
        ),
        ("prefill: ", "likewise: the scan of a forward's rows is bound by its products"),
        ("first: ", "all summaries are read, 160 bytes a token of this shape, and scored"),
        (
            "",
            "a manifest, a table and names have a row for each chunk; at a million tokens find, "
            "fork and restore together take less than two decoded tokens, and so does a save "
            "([note 11](design/11-snapshots-and-stores.md))",
        ),
    ),
    "alone": (
        (
            "from the start",
            "imports: transformers alone takes a prompt 6.6 s after the start of its process",
        ),
        (
            "restored token",
            "163 of 216 ms behind 4K are reading and verifying into memory of the pool that is "
            "touched for the first time; llama.cpp clears its memory at the start",
        ),
    ),
    "residency_traffic": (("", "chunks are whole ([note 9](design/09-residency.md))"),),
    "quality_needles": (("", "why `auto` keeps the first layer in the model's dtype"),),
    "warm_state": (
        ("file cached", "each byte is verified, which LMCache does not do"),
        ("", "each byte is verified while others are read"),
    ),
    "training_cost": (
        (
            "weights_changed",
            "half of it is BLAKE3 of all weights, half one forward ([note 21](design/"
            "21-gradients.md))",
        ),
    ),
}


def limit_of(report: str, line: str) -> str:
    """What limits a missed figure, in Markdown; empty where that was not found.

    report: its name without a size. line: as `suite.shortfalls` has it.
    """
    fitting = (why for words, why in _LIMITS.get(report, ()) if words in line)
    return next(fitting, "")

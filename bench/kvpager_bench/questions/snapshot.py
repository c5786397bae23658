"""Saving, verifying and restoring a snapshot as the context grows, beside copies of its bytes.

    kvpager bench snapshot --
    kvpager bench snapshot -- --layouts shipped --contexts 4096,65536

K/V are random and injected: what a model would say of them plays no part. A snapshot is one file;
each layout and context has a process of its own, in which peers take turns with us, round by round.

Saving, to a new name: beside memcpy of the file's bytes, writing them in 1 MiB blocks with one
fsync, doing so into space reserved beforehand from two threads, and safetensors and torch.save of
the same K/V with an fsync. An asynchronous save blocks the session for the freeze alone.

Reading, from the page cache and dropped from it: verifying everything, beside reading the file
plainly; opening and restoring; and the first forward after it, a row that attends top-k at every
layer, beside loading the whole of the same K/V with safetensors (and touching it) and torch.load;
and the same of an encrypted copy of the file.
Bytes read are those the system counts for the process, not what kvpager says of itself.

All memory is touched before it is timed; disks are compared round by round, since they vary more
than anything else here.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from kvpager_bench import harness, subjects
from kvpager_bench.file_peers import FILE_STATES, TENSOR_FILES
from kvpager_bench.harness import Column, Report, Timing
from kvpager_bench.places import scratch_folder
from kvpager_bench.snapshot_work import (
    CHUNKS,
    LARGE_RUNS,
    POOL_TOKENS,
    TAIL_TOKENS,
    work_read,
    work_save,
)
from kvpager_bench.study import Asked, Option, Study, Table, ints

FLAT = 2.0  # how much longer a restore may take at the longest context
ENCRYPTED = 1.15  # how much longer a restore may take of an encrypted file
AIM = 0.9  # of the slower of memcpy and disk: saving, verifying
CONTEXTS = {"shipped": (4096, 65536, 262144), "gqa4-bf16": (4096, 32768)}
WORDS = {"cached": "in the page cache", "dropped": "from disk"}
SLOWER = "the slower of memcpy and disk"

SAVE_COLUMNS = (
    Column("layout", text=True),
    Column("context", "tokens"),
    Column("file_mib", "MiB"),
    Column("save_gbs", "GB/s"),
    Column("write_fsync_gbs", "GB/s"),
    Column("reserved_write_gbs", "GB/s"),
    Column("memcpy_gbs", "GB/s"),
    Column("share_of_slower", "", 2),
    Column("share_by_round", "median", 2),
    Column("safetensors_gbs", "GB/s"),
    Column("torch_save_gbs", "GB/s"),
    Column("save_spread", "(max-min)/median", 2),
    Column("write_spread", "(max-min)/median", 2),
    Column("freeze_ms", "ms"),
    Column("memory_mib", "MiB at most"),
)
READ_COLUMNS = (
    Column("layout", text=True),
    Column("context", "tokens"),
    Column("file", text=True),
    Column("verify_gbs", "GB/s"),
    Column("read_gbs", "GB/s"),
    Column("memcpy_gbs", "GB/s"),
    Column("verify_of_read", "", 2),
    Column("restore_ms", "ms"),
    Column("restore_spread", "(max-min)/median", 2),
    Column("first_forward_ms", "ms"),
    Column("restore_reads_mib", "MiB"),
    Column("first_forward_reads_mib", "MiB"),
    Column("bound_mib", "MiB"),
    Column("file_mib", "MiB"),
    Column("share_read", "%", 2),
    Column("read_file_ms", "ms"),
    Column("safetensors_load_ms", "ms"),
    Column("torch_load_ms", "ms"),
    Column("encrypted_verify_gbs", "GB/s"),
    Column("encrypted_first_forward_ms", "ms"),
)


def add_save(report: Report, task: dict[str, Any], saved: dict[str, Any]) -> None:
    timings = {name: Timing(tuple(runs)) for name, runs in saved["runs"].items()}
    size = dict.fromkeys(TENSOR_FILES, saved["tensor_bytes"])
    rate = {
        name: size.get(name, saved["file_bytes"]) / timing.median / 1e9
        for name, timing in timings.items()
    }
    disk = max(("write_fsync", "reserved"), key=rate.__getitem__)  # the better plain way
    by_round = [
        max(memcpy, written) / ours
        for ours, memcpy, written in zip(*(timings[name].runs for name in ("save", "memcpy", disk)))
    ]
    report.add(
        layout=task["layout"],
        context=task["context"],
        file_mib=saved["file_bytes"] / 2**20,
        save_gbs=rate["save"],
        write_fsync_gbs=rate["write_fsync"],
        reserved_write_gbs=rate["reserved"],
        memcpy_gbs=rate["memcpy"],
        share_of_slower=rate["save"] / min(rate["memcpy"], rate[disk]),
        share_by_round=statistics.median(by_round),
        safetensors_gbs=rate["safetensors"],
        torch_save_gbs=rate["torch.save"],
        save_spread=timings["save"].spread,
        write_spread=timings["write_fsync"].spread,
        freeze_ms=Timing(tuple(saved["freeze"])).median * 1e3,
        memory_mib=saved["memory_bytes"] / 2**20,
    )
    figure, save = f"saving {_cell(task)}", rate["save"]
    report.compare(figure, save, save / statistics.median(by_round), SLOWER, "GB/s", AIM)
    for how in TENSOR_FILES:
        report.compare(figure, save, rate[how], f"{how} + fsync", "GB/s", 1.0)


def _cell(task: dict[str, Any]) -> str:
    return f"{harness.tokens_name(task['context'])} of {task['layout']}"


def add_read(report: Report, task: dict[str, Any], answer: dict[str, Any]) -> None:
    size = answer["file_bytes"]
    for state in FILE_STATES:
        measured = answer[state]
        median = {
            name: Timing(tuple(measured[name])).median
            for name in ("verify", "read", "memcpy", "restore", "first_forward", *TENSOR_FILES)
        }
        encrypted = Timing(tuple(measured["encrypted"]["first_forward"])).median * 1e3
        report.add(
            layout=task["layout"],
            context=task["context"],
            file=state,
            verify_gbs=size / median["verify"] / 1e9,
            read_gbs=size / median["read"] / 1e9,
            memcpy_gbs=size / median["memcpy"] / 1e9,
            verify_of_read=median["read"] / median["verify"],
            restore_ms=median["restore"] * 1e3,
            restore_spread=Timing(tuple(measured["restore"])).spread,
            first_forward_ms=median["first_forward"] * 1e3,
            restore_reads_mib=measured["restore_bytes"] / 2**20,
            first_forward_reads_mib=measured["forward_bytes"] / 2**20,
            bound_mib=answer["bound"] / 2**20,
            file_mib=size / 2**20,
            share_read=100 * measured["forward_bytes"] / size,
            read_file_ms=median["read"] * 1e3,
            safetensors_load_ms=median["safetensors"] * 1e3,
            torch_load_ms=median["torch.save"] * 1e3,
            encrypted_verify_gbs=size / Timing(tuple(measured["verify_encrypted"])).median / 1e9,
            encrypted_first_forward_ms=encrypted,
        )
        slower = statistics.median(
            max(read, copied) / ours
            for ours, read, copied in zip(
                *(measured[name] for name in ("verify", "read", "memcpy"))
            )
        )
        verify = size / median["verify"] / 1e9
        figure = f"verifying {_cell(task)}, {WORDS[state]}"
        report.compare(figure, verify, verify / slower, SLOWER, "GB/s", AIM)
        figure = f"restoring {_cell(task)} with its first forward, {WORDS[state]}"
        times = median["first_forward"] * 1e3, median["safetensors"] * 1e3
        report.compare(figure, *times, "safetensors load", "ms", lower_is_better=True)
        figure = f"restoring {_cell(task)} with its first forward, encrypted, {WORDS[state]}"
        times = encrypted, median["first_forward"] * 1e3
        report.compare(figure, *times, "the same, plain", "ms", 1 / ENCRYPTED, lower_is_better=True)


def judge(saves: Report, reads: Report) -> None:
    for layout in dict.fromkeys(str(row["layout"]) for row in saves.rows):
        shares = {
            harness.tokens_name(int(saves.number(row, "context"))): saves.number(
                row, "share_by_round"
            )
            for row in saves.rows
            if row["layout"] == layout
        }
        saves.judge(
            f"{layout}: a save runs at 0.9 of the slower of memcpy and write + fsync, "
            "round by round",
            min(shares.values()) >= 0.9,
            ", ".join(f"{context} {share:.2f}" for context, share in shares.items()),
        )
        for state in FILE_STATES:
            rows = [r for r in reads.rows if (r["layout"], r["file"]) == (layout, state)]
            low, high = (
                choose(rows, key=lambda row: reads.number(row, "context")) for choose in (min, max)
            )
            grown = reads.number(high, "restore_ms") / reads.number(low, "restore_ms")
            whole = reads.number(high, "read_file_ms") / reads.number(low, "read_file_ms")
            names = [harness.tokens_name(int(reads.number(row, "context"))) for row in (low, high)]
            if high is not low:
                figure = f"open and restore at {names[1]} of {layout}, {WORDS[state]}"
                times = reads.number(high, "restore_ms"), reads.number(low, "restore_ms")
                peer = f"the same at {names[0]}"
                reads.compare(figure, *times, peer, "ms", 1 / FLAT, lower_is_better=True)
            reads.judge(
                f"{layout}, {state} file: open and restore at {names[1]} take at most {FLAT:g} "
                f"times as long as at {names[0]}",
                grown <= FLAT,
                f"{grown:.1f} times; reading the whole file takes {whole:.1f} times as long",
            )
    over = [
        row
        for row in reads.rows
        if reads.number(row, "first_forward_reads_mib") > reads.number(row, "bound_mib")
    ]
    most = max(reads.rows, key=lambda row: reads.number(row, "context"))
    reads.judge(
        "restore and first forward read no more than metadata, summaries and selected chunks",
        not over,
        f"{reads.number(most, 'first_forward_reads_mib'):.1f} of "
        f"{reads.number(most, 'file_mib'):.1f} MiB at the longest context",
    )


def measure(asked: Asked) -> None:
    o, saves, reads = asked.options, asked.report("snapshot_save"), asked.report("snapshot_read")
    with scratch_folder(o.folder) as folder:
        for layout in o.layouts:
            for context in o.contexts or CONTEXTS[layout]:
                task = {"layout": layout, "context": context, "runs": o.runs, "folder": str(folder)}
                add_save(saves, task, asked.work("save", **task))
                add_read(reads, task, asked.work("read", **task))
                for file in folder.iterdir():
                    file.unlink()
    judge(saves, reads)


STUDY = Study(
    measure,
    (
        Table(
            "snapshot_save",
            "Saving a snapshot, beside copying and writing the same bytes",
            SAVE_COLUMNS,
        ),
        Table(
            "snapshot_read",
            "Verifying and restoring a snapshot, beside reading the whole of it",
            READ_COLUMNS,
        ),
    ),
    (
        Option("layouts", list(subjects.LAYOUTS), among=subjects.LAYOUTS),
        Option("contexts", [], [1024, 4096], [4096, 16384, 65536, 131072, 262144], kind=ints),
        Option("runs", 7, quick=2),
        Option("folder", None, help="where snapshots go; a temporary folder", kind=Path),
    ),
    {
        "chunks": CHUNKS,
        "pool_tokens": POOL_TOKENS,
        "tail_tokens": TAIL_TOKENS,
        "runs_of_large_files": LARGE_RUNS,
    },
    {"save": work_save, "read": work_read},
)

if __name__ == "__main__":
    STUDY.main()

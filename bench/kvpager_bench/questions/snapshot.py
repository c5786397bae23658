"""Saving, verifying and restoring a snapshot as the context grows, beside copies of its bytes.

    kvpager bench snapshot --
    kvpager bench snapshot -- --layouts shipped --contexts 4096,65536

K/V are random and injected: what a model would say of them plays no part. A snapshot is one file;
each layout and context has a process of its own, in which peers take turns with us, round by round.

Saving, to a new name: beside memcpy of the file's bytes, writing them in 1 MiB blocks with one
fsync, doing so into space reserved beforehand from two threads, the first with the rename and the
second fsync which make a save atomic, the program dd, and safetensors and torch.save of the same
K/V with an fsync. An asynchronous save blocks the session for the freeze alone.

Reading, from the page cache and dropped from it: verifying everything, beside reading the file
plainly; opening and restoring; and the first forward after it, a row that attends top-k at every
layer, beside loading the whole of the same K/V with safetensors (and touching it) and torch.load.
Bytes read are those the system counts for the process, not what kvpager says of itself.

All memory is touched before it is timed; disks are compared round by round, since they vary more
than anything else here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

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

FLAT = 2.0  # how much longer a restore may take at the longest context
AIM = 0.9  # of the slower of memcpy and disk: saving, verifying
CONTEXTS = {"shipped": (4096, 65536, 262144), "gqa4-bf16": (4096, 32768)}
FULL_CONTEXTS = (4096, 16384, 65536, 131072, 262144)
QUICK_CONTEXTS = (1024, 4096)
WORDS = {"cached": "in the page cache", "dropped": "from disk"}
SLOWER = "the slower of memcpy and disk"

SAVE_COLUMNS = (
    Column("layout", text=True),
    Column("context", "tokens"),
    Column("file_mib", "MiB"),
    Column("save_gbs", "GB/s"),
    Column("write_fsync_gbs", "GB/s"),
    Column("reserved_write_gbs", "GB/s"),
    Column("atomic_write_gbs", "GB/s"),
    Column("memcpy_gbs", "GB/s"),
    Column("share_of_slower", "", 2),
    Column("share_by_round", "median", 2),
    Column("dd_gbs", "GB/s", optional=True),
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
        atomic_write_gbs=rate["atomic"],
        memcpy_gbs=rate["memcpy"],
        share_of_slower=rate["save"] / min(rate["memcpy"], rate[disk]),
        share_by_round=statistics.median(by_round),
        dd_gbs=rate.get("dd", harness.NOT_APPLICABLE),
        safetensors_gbs=rate["safetensors"],
        torch_save_gbs=rate["torch.save"],
        save_spread=timings["save"].spread,
        write_spread=timings["write_fsync"].spread,
        freeze_ms=Timing(tuple(saved["freeze"])).median * 1e3,
        memory_mib=saved["memory_bytes"] / 2**20,
    )
    report.compare(
        f"saving {_cell(task)}",
        ours=rate["save"],
        theirs=rate["save"] / statistics.median(by_round),
        peer=SLOWER,
        unit="GB/s",
        aim=AIM,
    )
    for how in TENSOR_FILES:
        report.compare(
            f"saving {_cell(task)}",
            ours=rate["save"],
            theirs=rate[how],
            peer=f"{how} + fsync",
            unit="GB/s",
            aim=1.0,
        )


def _cell(task: dict[str, Any]) -> str:
    return f"{harness.tokens_name(task['context'])} of {task['layout']}"


WORKERS = {"save": work_save, "read": work_read}


def add_read(report: Report, task: dict[str, Any], answer: dict[str, Any]) -> None:
    size = answer["file_bytes"]
    for state in FILE_STATES:
        measured = answer[state]
        median = {
            name: Timing(tuple(measured[name])).median
            for name in ("verify", "read", "memcpy", "restore", "first_forward", *TENSOR_FILES)
        }
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
        )
        slower = statistics.median(
            max(read, copied) / ours
            for ours, read, copied in zip(
                *(measured[name] for name in ("verify", "read", "memcpy"))
            )
        )
        verify = size / median["verify"] / 1e9
        report.compare(
            f"verifying {_cell(task)}, {WORDS[state]}",
            ours=verify,
            theirs=verify / slower,
            peer=SLOWER,
            unit="GB/s",
            aim=AIM,
        )
        report.compare(
            f"restoring {_cell(task)} with its first forward, {WORDS[state]}",
            ours=median["first_forward"] * 1e3,
            theirs=median["safetensors"] * 1e3,
            peer="safetensors load",
            unit="ms",
            aim=None,
            lower_is_better=True,
        )


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
                reads.compare(
                    f"open and restore at {names[1]} of {layout}, {WORDS[state]}",
                    ours=reads.number(high, "restore_ms"),
                    theirs=reads.number(low, "restore_ms"),
                    peer=f"the same at {names[0]}",
                    unit="ms",
                    aim=1 / FLAT,
                    lower_is_better=True,
                )
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


def measure_cell(task: dict[str, Any], saves: Report, reads: Report) -> None:
    try:
        add_save(saves, task, harness.run_worker(__spec__.name, {"what": "save", **task}))
        add_read(reads, task, harness.run_worker(__spec__.name, {"what": "read", **task}))
    finally:
        for file in Path(task["folder"]).iterdir():
            file.unlink()
    print(
        f"{task['layout']}, {task['context']} tokens: save "
        f"{saves.rows[-1]['share_of_slower']:.2f} of the slower peer, restore "
        f"{reads.rows[-2]['restore_ms']:.2f} ms",
        flush=True,
    )


def contexts_of(layout: str, arguments: argparse.Namespace) -> Iterable[int]:
    if arguments.contexts:
        return list(arguments.contexts)
    if arguments.quick:
        return QUICK_CONTEXTS
    return FULL_CONTEXTS if arguments.full else CONTEXTS[layout]


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--layouts", type=harness.parse_list, default=list(subjects.LAYOUTS))
    parser.add_argument("--contexts", type=harness.parse_ints)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--folder", type=Path, help="where snapshots go; a temporary folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task = json.loads(arguments.worker)
        torch.set_num_threads(task["threads"])
        print(json.dumps(WORKERS[task["what"]](task)))
        return
    arguments.runs = arguments.runs or (2 if arguments.quick else 7)
    record = harness.start(arguments)
    settings = {
        "chunks": CHUNKS,
        "pool_tokens": POOL_TOKENS,
        "tail_tokens": TAIL_TOKENS,
        "runs": arguments.runs,
        "runs_of_large_files": min(LARGE_RUNS, arguments.runs),
    }
    saves = Report(
        harness.report_name("snapshot_save", arguments),
        "Saving a snapshot, beside copying and writing the same bytes",
        SAVE_COLUMNS,
        settings,
        record,
    )
    reads = Report(
        harness.report_name("snapshot_read", arguments),
        "Verifying and restoring a snapshot, beside reading the whole of it",
        READ_COLUMNS,
        settings,
        record,
    )
    with scratch_folder(arguments.folder) as folder:
        for layout in arguments.layouts:
            for context in contexts_of(layout, arguments):
                task = {
                    "layout": layout,
                    "context": context,
                    "threads": arguments.threads,
                    "runs": arguments.runs,
                    "folder": str(folder),
                }
                measure_cell(task, saves, reads)
    judge(saves, reads)
    saves.finish()
    reads.finish()


if __name__ == "__main__":
    main()

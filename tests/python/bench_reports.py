"""Reports with made-up numbers, for tests of what is made of them."""

from __future__ import annotations

from kvpager_bench.report import ENVIRONMENT, Column, Report


def environment(**changes):
    values = dict.fromkeys(ENVIRONMENT, 1) | {
        "cpu": "Test CPU",
        "isa": "v4",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "kvpager": "0.1.0",
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-11-22T00:00:00+00:00",
    }
    return values | changes


def make_report(name="sample", columns=None, rows=(), **changes):
    """One row, unless others are given."""
    columns = columns or (Column("shape", text=True), Column("time_ms", "ms"))
    values = {
        "name": name,
        "question": f"How fast is {name}?",
        "columns": tuple(columns),
        "settings": {"runs": 3, "layers": {"shipped": 2}, "chunks": 58, "needles": 16},
        "environment": environment(),
    }
    report = Report(**(values | changes))
    for row in rows or ({"shape": "a", "time_ms": 1.25},):
        report.add(**row)
    return report


def decode_report():
    lines = ("tokens_per_s", "dense_tokens_per_s", "transformers_tokens_per_s")
    columns = (
        Column("shape", text=True),
        Column("context", "tokens"),
        *(Column(name, "ms") for name in ("model_ms", "scan_ms", "attention_ms", "rest_ms")),
        *(Column(name, "1/s") for name in lines),
        Column("llama_tokens_per_s", "1/s", optional=True),
        *(Column(name, "ms") for name in ("dense_step_ms", "transformers_step_ms")),
    )
    rows = [
        {column.name: 2.0 * (i + 1) for column in columns[2:]}
        | {"shape": shape, "context": context, "llama_tokens_per_s": "n/a"}
        for shape in ("gqa8, bfloat16", "gqa8, float32")
        for i, context in enumerate((8192, 32768, 131072))
    ]
    report = make_report("decode", columns, rows)
    report.compare(
        "decode at 128K, bfloat16",
        ours=40.0,
        theirs=4.0,
        peer="transformers",
        unit="tokens/s",
        aim=5.0,
    )
    report.skip("llama.cpp 0.3.36", "not installed")
    return report


def warm_report():
    columns = (
        *(Column(name, text=True) for name in ("shape", "file")),
        Column("context", "tokens"),
        *(Column(name, "s") for name in ("cold_s", "transformers_cold_s")),
        *(Column(name, "ms") for name in ("first_token_ms", "safetensors_ms", "torch_save_ms")),
        Column("llama_ms", "ms", optional=True),
    )
    rows = [
        {column.name: 3.0 * (i + 1) for column in columns[2:]}
        | {"shape": shape, "file": file, "context": context, "llama_ms": "n/a" if i else 7.5}
        for shape in ("shipped-fp32", "gqa8-bf16")
        for file in ("cached", "dropped")
        for i, context in enumerate((4096, 32768))
    ]
    report = make_report("warm", columns, rows)
    report.compare(
        "first token after a restore at 32K",
        ours=30.0,
        theirs=1200.0,
        peer="transformers, cold",
        unit="ms",
        aim=30,
        lower_is_better=True,
    )
    return report


def quality_report():
    columns = (
        Column("policy", text=True),
        *(Column(name) for name in ("budget", "found", "asked")),
    )
    rows = [
        {"policy": policy, "budget": budget, "found": found, "asked": 16}
        for policy, most in (("kvpager", 16), ("oracle", 16), ("kvpress SnapKV", 9))
        for budget, found in ((3.0, most // 2), (6.0, most))
    ]
    return make_report("quality", columns, rows)


def attention_report():
    report = make_report("attention")
    for rows, ours in ((1, 26.0), (64, 150.0)):
        report.compare(
            f"attention of {rows} rows at 32K, bfloat16",
            ours=ours,
            theirs=32.0,
            peer="memory bandwidth",
            unit="GB/s",
            aim=0.8,
        )
    return report


def whole_suite():
    return [attention_report(), decode_report(), warm_report(), quality_report()]


def named_rows(data):
    """The rows of a written report, each by the names of its columns."""
    names = [column["name"] for column in data["columns"]]
    return [dict(zip(names, row, strict=True)) for row in data["rows"]]

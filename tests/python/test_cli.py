"""The command line itself: help, typos, options and their order, and what is refused at once."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from cli_snapshots import files_below, refused, told_json

from kvpager.cli import main
from kvpager.cli.commands import parse
from kvpager.cli.failure import UsageError
from kvpager.cli.pager_options import pager_config
from kvpager.config import (
    Dense,
    PagerConfig,
    TopK,
    Window,
    config_from_json,
    config_to_json,
)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("genrate", "generate"),
        ("snapshot inspct file", "inspect"),
        ("generate --modle somewhere", "--model"),  # even where another is missing
        ("score --againts y", "--against"),
        ("demo --needels 3", "--needles"),
        ("plan --contxt 4K", "--context"),
        ("snapshot diff --fromat json", "--format"),
        ("info --form json", "--format"),  # an abbreviation is not guessed
        ("info --format jsn", "json"),
        ("generate --model x --ids 1 --speculate promt-lookup", "prompt-lookup"),
    ],
)
def test_what_was_mistyped_is_told_with_the_closest_there_is(capsys, line, meant):
    assert f"did you mean {meant}?" in refused(capsys, *line.split(), code=2)


def test_version_prints_the_package_version(capsys):
    import kvpager

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvpager {kvpager.__version__}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "snapshot look into saved sessions"),
        ("snapshot", "130 when interrupted"),
        ("snapshot rm", "usage: kvpager snapshot rm"),
        ("demo", "questions, over all turns (default: 16)"),
        *(
            ("generate", f"--{option.name.replace('_', '-')}")
            for option in (*PagerConfig.options(), *TopK.options(), *Window.options())
        ),
        ("generate", "[KVPAGER_POOL_TOKENS]"),
    ],
)
def test_help_documents_commands_exit_codes_and_every_option_of_the_pager(capsys, line, words):
    with pytest.raises(SystemExit) as ended:
        main([*line.split(), "--help-all" if line == "generate" else "--help"])
    assert ended.value.code == 0
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["chat", "demo", "generate", "serve", "score", "verify"])
def test_help_fits_a_screen_and_help_all_names_every_option(capsys, monkeypatch, command):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([command, flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
    short = shown["--help"].split("Without --model")[0].splitlines()
    assert len(short) <= 24
    assert all(len(line) <= 100 for line in short)
    options = set(re.findall(r"--[a-z][\w-]*", "\n".join(short)))
    assert options <= set(re.findall(r"--[a-z][\w-]*", shown["--help-all"]))
    every = int(re.search(r"--help-all +all (\d+) options", shown["--help"])[1])
    assert every > len(options)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_script_completes_commands_and_options(capsys, shell):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    for word in ("generate", "snapshot", "restore", "kv-dtype"):
        assert word in script


def test_json_is_short_for_its_format(capsys):
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "CPU"


def test_info_tells_what_is_installed(capsys):
    values = told_json(capsys, "info")
    assert values["backend"] == "CPU"
    assert main(["info"]) == 0
    assert f"instruction set    {values['instruction_set']}" in capsys.readouterr().out


def test_debug_shows_where_a_failure_came_from(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVPAGER_DEBUG", "1")
    assert main(["snapshot", "inspect", str(tmp_path / "none.kvsnap")]) == 1
    assert "Traceback" in capsys.readouterr().err


# Refusals: exit code, command line, words. x is no model, so that nothing was loaded.
GENERATE = "generate --model x --ids 1"
REFUSED = [
    (2, "", "are required: COMMAND"),
    (2, "generate --ids 1", "are required: --model"),
    (
        2,
        "generate --model x",
        "a prompt is missing; give --prompt, --prompt-file, --ids, --message",
    ),
    (2, "score --model x", "give --prompt, --prompt-file, --ids or --against"),
    (2, "generate --model x --prompt x --message y", "not allowed with argument --prompt"),
    (2, "score --model x --ids 1 --against y", "not allowed with"),
    (2, f"{GENERATE} --json-schema a --regex b", "not allowed with"),
    (2, "generate --model x --ids=", "--ids is empty"),
    (2, "generate --model x --ids 1,x", "'x' is no token id"),
    (2, "score --model x --ids=-3", "'-3' is no token id"),
    (1, "score --model x --prompt-file none.txt", "--prompt-file none.txt: No such file"),
    (1, "score --model x --prompt-file latin", "--prompt-file latin: not UTF-8"),
    (1, f"{GENERATE} --json-schema none.json", "--json-schema none.json: No such file"),
    (1, "generate --model x --messages none", "--messages none: No such file"),
    (1, "generate --model x --messages no_json", "--messages no_json: no JSON"),
    (1, "generate --model x --messages no_list", "no_list: messages is {}; expected a list"),
    (1, "generate --model x --messages no_role", "messages[0] is {'content': 'x'}"),
    (1, "generate --model none --ids 1", "none: no such folder"),
    (1, "generate --model damaged --ids 1", "--model damaged: "),
    (2, f"{GENERATE} --pool many", "--pool-tokens is 'many'"),
    (2, "verify --pool auto", '--pool-tokens is "auto"; expected a number of tokens'),
    (2, "verify --exact off", "promises nothing"),
    (2, f"{GENERATE} --temperature=-1", "--temperature is -1.0; expected a finite number"),
    (2, f"{GENERATE} --top-p 2", "--top-p is 2.0; expected"),
    (2, f"{GENERATE} --seed {1 << 64}", f"--seed is {1 << 64}; expected"),
    (2, f"{GENERATE} --stop ''", "--stop is empty"),
    *((2, f"{GENERATE} --logit-bias={bias}", "no ID=BIAS") for bias in ("5", "x=1", "5=much")),
    (2, f"{GENERATE} --speculate --exact reuse", "--exact is 'reuse', under which"),
    (2, f"{GENERATE} --speculate --exact false", "use --exact all, or no --speculate"),
    (2, f"{GENERATE} --speculate draft", "--speculate draft: no draft model; give --draft"),
    (2, f"{GENERATE} --speculate prompt-lookup --draft M", "--draft has no meaning with"),
    (2, f"{GENERATE} --continue-final-message", "has no meaning without --messages"),
    (2, f"{GENERATE} --store-budget 1GiB", "--store-budget has no meaning without --store"),
    (2, f"{GENERATE} --store-ttl 7d", "--store-ttl has no meaning without --store"),
    (2, f"{GENERATE} --file-mode 640", "--file-mode has no meaning without --save or --store"),
    (2, f"{GENERATE} --on-corrupt recompute", "--on-corrupt has no meaning without --restore"),
    (2, f"{GENERATE} --on-mismatch convert", "--on-mismatch has no meaning without --restore"),
    (2, f"{GENERATE} --save-kv-dtype q8", "--save-kv-dtype has no meaning without --save"),
    (2, "score --model x --ids 1 --on-mismatch compare", "has no meaning without --against"),
    (2, f"{GENERATE} --store s --store-budget much", "--store-budget is 'much'"),
    (2, f"{GENERATE} --store s --store-ttl soon", "--store-ttl is 'soon'"),
    (2, f"{GENERATE} --store s --save ../up", "--save is '../up'"),
]


@pytest.mark.parametrize(("code", "line", "words"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_made(
    capsys, monkeypatch, tmp_path, code, line, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_json").write_text("[")
    (tmp_path / "no_list").write_text("{}")
    (tmp_path / "no_role").write_text('[{"content": "x"}]')
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("rubbish")
    before = files_below(tmp_path)
    assert words in refused(capsys, *shlex.split(line), code=code)
    assert files_below(tmp_path) == before


# Options of the pager.


def options(*arguments):
    return pager_config(parse(["generate", "--model", "x", *arguments]))


def test_an_option_goes_before_the_environment_and_that_before_the_default(monkeypatch):
    assert options().pool_tokens == 2048
    monkeypatch.setenv("KVPAGER_POOL_TOKENS", "4096")
    monkeypatch.setenv("KVPAGER_POLICY", "lru")
    assert options().pool_tokens == 4096
    assert options("--pool", "1024").pool_tokens == 1024
    assert options("--pool", "1024").policy == "lru"


def test_every_option_reaches_the_configuration(tmp_path):
    config = options(
        *("--pool-tokens", "8192", "--chunk-tokens", "128", "--rows", "32"),
        *("--selection", "topk", "--chunks", "7", "--sinks", "128", "--recent", "512"),
        *("--always", "0:64,128:256", "--host-bytes", "1GiB"),
        *("--disk-path", str(tmp_path), "--disk-bytes", "2GiB", "--summary-bytes", "64MiB"),
        *("--policy", "lru", "--recall-chunks", "2", "--hysteresis", "0.5"),
        *("--kv-dtype", "bfloat16", "--debug-shuffle-seed", "3", "--debug-poison"),
        *("--exact", "false", "--small-rows", "4,16"),
    )
    assert config == PagerConfig(
        pool_tokens=8192,
        chunk_tokens=128,
        rows=32,
        small_rows=(4, 16),
        exact=False,
        selection=TopK(chunks=7, sinks=128, recent=512, always=((0, 64), (128, 256))),
        host_bytes=2**30,
        disk_path=str(tmp_path),
        disk_bytes=2**31,
        summary_bytes=64 * 2**20,
        policy="lru",
        recall_chunks=2,
        hysteresis=0.5,
        kv_dtype="bfloat16",
        debug_shuffle_seed=3,
        debug_poison=True,
    )
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_selection_is_dense_unless_chunks_or_a_name_say_otherwise(monkeypatch):
    assert options().selection == Dense()
    assert options("--chunks", "5").selection == TopK(chunks=5)
    assert options("--selection", "topk").selection == TopK(chunks=32)
    assert options("--selection", "window", "--recent", "512").selection == Window(recent=512)
    monkeypatch.setenv("KVPAGER_SELECTION", "topk")
    assert options("--dense").selection == Dense()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("exact", "all", "all"),
        ("exact", "reuse", "reuse"),
        ("exact", "False", False),
        ("small_rows", "proven", "proven"),
        ("small_rows", "4,16", (4, 16)),
        ("small_rows", "8", (8,)),
        ("rows", "none", None),
        ("pool_tokens", "auto", "auto"),
        ("graphs", "off", False),
    ],
)
def test_words_and_numbers_are_read_in_an_option_and_in_the_environment(
    monkeypatch, name, text, value
):
    flag = ["--" + name.replace("_", "-"), text] if name != "graphs" else ["--no-graphs"]
    assert getattr(options(*flag), name) == value
    monkeypatch.setenv(f"KVPAGER_{name.upper()}", text)
    assert getattr(options(), name) == value


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--exact sometimes", '--exact is \'sometimes\'; expected "all", "reuse" or False'),
        ("--exact true", "--exact is True; expected"),
        ("--small-rows some", "--small-rows is 'some'; expected"),
        ("--small-rows 16,4", "--small-rows is (16, 4); expected"),
        ("--small-rows 4,x", "--small-rows is '4,x'; expected"),
        ("--pool atuo", "--pool-tokens is 'atuo'; expected an integer"),
        ("--pool 100", "a multiple of chunk_tokens"),
        ("--pool 64 --rows 64", "--pool-tokens is 64; expected at least 192"),
        ("--host 4GB4", "--host-bytes is '4GB4'"),
        ("--policy lrru", "--policy is 'lrru'"),
        ("--always 5:1 --chunks 3", "--always"),
        ("--always abc --chunks 3", "--always"),
        ("--always 0:64", "--always has no meaning with --selection dense"),
        ("--dense --chunks 3", "--chunks has no meaning with --selection dense"),
        ("--selection window", "expected --recent with it"),
        ("--recent 32 --chunks 3 --rows 64", "--recent is 32"),
    ],
)
def test_a_refused_value_is_named_by_its_option(line, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        options(*line.split())


@pytest.mark.parametrize(
    ("variable", "text"), [("KVPAGER_SELECTION", "best"), ("KVPAGER_POOL_TOKENS", "abc")]
)
def test_a_refused_value_of_the_environment_is_named_by_its_variable(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=f"{variable} is '{text}'"):
        options()


# Runs a command where none of what extras bring is installed.
CORE_ALONE = """
import sys
from importlib.machinery import PathFinder
class Found(PathFinder):
    def find_spec(name, path=None, target=None):
        lacking = name.split(".")[0] in LACKING
        return None if lacking else PathFinder.find_spec(name, path, target)
LACKING = {
    "accelerate", "cryptography", "fastapi", "gguf", "llguidance", "matplotlib", "obstore",
    "opentelemetry", "prometheus_client", "pydantic", "ray", "sse_starlette", "starlette",
    "uvicorn",
}
sys.meta_path[sys.meta_path.index(PathFinder)] = Found
from kvpager.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--help", 0, "serve"),
        ("info", 0, "torch"),
        ("serve", 1, "pip install 'kvpager[serve]'"),
        ("snapshot ls s3://bucket/store", 1, "install kvpager[s3]"),
        ("chat --model FILE.gguf", 1, "pip install 'kvpager[gguf]'"),
    ],
)
def test_commands_work_with_the_packages_of_no_extra_or_name_it(tmp_path, line, code, words):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    arguments = line.replace("FILE.gguf", str(file)).split()
    done = subprocess.run(
        [sys.executable, "-c", CORE_ALONE, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "KVPAGER_CACHE": str(tmp_path / "cache")},
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in done.stdout + done.stderr

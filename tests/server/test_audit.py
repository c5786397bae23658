"""`kvpager audit`: what it finds at servers that are right, that round, and that are wrong."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from kvpager.audit import AuditError, Plan, Report, Server, audit
from kvpager.cli import main
from server.audited import standing_in

SMALL = Plan(prompts=4, prompt_tokens=160, max_tokens=12, eviction_tokens=0)
REUSES = ["warm", "warm, streamed", "continued", "warm in company"]
COLD = ["cold", "cold again", "cold, continued", "cold in company"]


def audited(server, **plan):
    """The report on a stand-in, which `restart_command` True restarts."""
    if plan.get("restart_command") is True:
        plan["restart_command"] = restart_of(server)
    report = Report(server.url)
    audit(Server(server.url), replace(SMALL, **plan), report, None)
    return report


def restart_of(server):
    program = f"import urllib.request as u; u.urlopen('{server.url}/restart', data=b'')"
    return f'{sys.executable} -c "{program}"'


def results(report):
    return {way.name: way.result for way in report.ways if way.comparisons}


def way(report, name):
    return next(way for way in report.ways if way.name == name)


# Servers that are right.


def test_a_server_that_gives_the_same_answers_in_every_way_is_exact():
    with standing_in() as server:
        report = audited(server, eviction_tokens=2000, restart_command=True)
    assert report.verdict == "exact"
    assert "is it a new process?" in report.notes[-1]  # the stand-in does not go away
    expected = [*COLD, *REUSES, "after eviction", "cold after restart", "after restart"]
    assert sorted(results(report)) == sorted(expected)
    assert way(report, "warm").cached_tokens > 0
    assert way(report, "cold again").cached_tokens == 0
    assert all(len(each.comparisons) == 4 for each in report.ways)


def test_the_server_of_this_project_is_exact(server):
    report = Report(server.url)
    plan = replace(SMALL, prompt_tokens=300, eviction_tokens=4000)
    audit(Server(server.url), plan, report, None)
    assert report.verdict == "exact", report.reason()
    assert report.cold == "cache_salt"
    assert way(report, "warm").cached_tokens > 0
    assert {each.largest for one in report.ways for each in one.comparisons} == {0.0}


@pytest.mark.parametrize(
    ("behaviour", "cold"),
    [
        ({"salts": True}, "cache_salt"),
        ({"salts": True, "reports": False}, "cache_salt"),
        ({"salts": False, "cache_prompt": True}, "cache_prompt"),
        ({"salts": None, "cache_prompt": True}, "cache_prompt"),
        ({"salts": False}, "new text"),
        ({"salts": None, "reports": False}, "new text"),
    ],
)
def test_cold_runs_are_made_as_the_server_allows(behaviour, cold):
    with standing_in(**behaviour) as server:
        report = audited(server)
    assert report.cold == cold
    assert report.verdict == "exact"
    names = set(results(report))
    assert names == {*REUSES, *(COLD if cold != "new text" else COLD[:1])}


def test_every_text_begins_with_something_new():
    with standing_in(salts=None) as server:
        first, second = (audited(server).prompts for _ in range(2))
    assert len({text[:25] for text in first + second}) == 8


@pytest.mark.parametrize("form", [{"ids": False}, {"ids": False, "chat_style": True}])
def test_answers_without_token_ids_are_continued_by_their_text(form):
    with standing_in(**form) as server:
        report = audited(server)
    assert report.verdict == "exact"
    assert len(way(report, "continued").comparisons) == 4


# Servers that round.


@pytest.mark.parametrize("salts", [True, False])
def test_rounding_that_flips_near_ties_is_neither_exact_nor_corrupt(salts):
    with standing_in(salts=salts, noise=1e-3) as server:
        report = audited(server, prompts=8, eviction_tokens=2000, restart_command=True)
    assert report.verdict == "not exact", report.reason()
    made = [each for one in report.ways for each in one.comparisons]
    flipped = [each for each in made if each.first_token is not None]
    assert flipped
    assert {each.result for each in flipped} == {"not exact"}
    assert all(0 < each.largest < 0.01 for each in flipped)


# Servers that are wrong.


def test_keys_and_values_of_another_request_are_corruption_in_the_ways_that_reuse():
    with standing_in(restored=lambda state, restarts: state ^ 1) as server:
        report = audited(server, eviction_tokens=2000)
    assert report.verdict == "corrupt"
    found = results(report)
    assert {found[name] for name in COLD} == {"exact"}
    assert {found[name] for name in REUSES} == {"corrupt"}
    worst = way(report, "warm").worst
    assert worst.from_token == 0
    assert "beyond rounding" in worst.why


def test_an_answer_to_another_prompt_is_named():
    def mixed_up(server, body, answer):
        whole = [each for each in server.asked if each["max_tokens"] == SMALL.max_tokens]
        other = next((each for each in whole[-2:] if each["prompt"] != body["prompt"]), body)
        return server.generate(server.tokens_of(other["prompt"]), body, cold=True)

    with standing_in(answered=mixed_up) as server:
        report = audited(server)
    assert report.verdict == "corrupt"
    whys = [each.why for each in way(report, "warm").comparisons]
    assert any(why.startswith("this is the answer to prompt ") for why in whys)


def test_log_probabilities_that_are_no_numbers_are_corruption():
    def lost(server, body, answer):
        answer.tops = [[(pairs[0][0], math.nan), *pairs[1:]] for pairs in answer.tops]
        return answer

    with standing_in(answered=lost) as server:
        report = audited(server)
    assert results(report)["warm"] == "corrupt"
    assert way(report, "warm").worst.why == "a log-probability is not a number"
    assert results(report)["cold again"] == "exact"


@pytest.mark.parametrize("ids", [True, False])
def test_where_a_server_cannot_write_its_numbers_the_text_is_judged(ids):
    def lost(server, body, answer):
        if "logprobs" in body:
            return 400
        answer.tokens = [" w0"] * len(answer.tokens)
        return answer

    with standing_in(answered=lost, ids=ids) as server:
        report = audited(server)
    assert results(report)["warm"] == "corrupt"
    assert {each.result for each in way(report, "continued").comparisons} == {"corrupt"}
    if ids:
        assert way(report, "warm").worst.why == "one token over and over"


@pytest.mark.parametrize("ids", [True, False])
def test_the_same_text_without_its_numbers_is_not_called_corrupt(ids):
    def lost(server, body, answer):
        return 500 if "logprobs" in body else answer

    with standing_in(answered=lost, ids=ids) as server:
        report = audited(server)
    assert report.verdict == "unknown"
    assert {results(report)[name] for name in REUSES} == {"unknown"}


def test_a_server_that_is_busy_is_not_called_corrupt():
    def busy(server, body, answer):
        if not body.get("stream"):
            return answer
        answer.tokens = [" w0"] * len(answer.tokens)
        return 503 if "logprobs" in body else answer

    with standing_in(answered=busy) as server:
        report = audited(server)
    assert report.verdict == "unknown"
    assert "503" in report.reason()


def test_what_is_wrong_after_a_restart_alone_is_found_with_its_first_token():
    def late(server, body, answer):
        if server.restarts and len(answer.tokens) > 7:
            for i in range(5, len(answer.tokens)):
                answer.tokens[i] = f" x{i}"
                answer.tops[i] = [(f" x{i}", -0.1)]
        return answer

    with standing_in(answered=late) as server:
        report = audited(server, restart_command=True)
    found = results(report)
    assert found.pop("after restart") == "corrupt"
    assert set(found.values()) == {"exact"}
    assert {each.from_token for each in way(report, "after restart").comparisons} == {5}
    assert report.reason().startswith("after restart, prompt ")


def test_a_cache_of_other_weights_is_corrupt_and_other_weights_alone_are_not():
    with standing_in(weights=lambda restarts: restarts) as server:
        stale = audited(server, restart_command=True)
    assert results(stale)["after restart"] == "corrupt"
    assert results(stale)["cold after restart"] == "not exact"
    assert any("other weights" in sentence for sentence in stale.notes)

    with standing_in(weights=lambda restarts: restarts, forgets=True) as server:
        report = audited(server, restart_command=True)
    assert results(report)["after restart"] == "exact"
    assert report.verdict == "not exact"
    assert report.reason().startswith("the model has changed since the restart; ")


def test_a_server_that_is_wrong_in_company_is_found():
    def crossed(server, body, answer):
        if server.busy > 1:
            answer.tops = [[(token, p - 1.0) for token, p in pairs] for pairs in answer.tops]
        return answer

    with standing_in(answered=crossed, seconds=0.02) as server:
        report = audited(server, prompts=8, concurrency=8)
    found = results(report)
    assert found.pop("warm in company") == "corrupt"
    assert set(found.values()) == {"exact"}
    assert 1 < server.busiest <= 8


# What cannot be told.


def test_a_server_that_reuses_nothing_is_not_called_exact():
    with standing_in(caches=False) as server:
        report = audited(server)
    assert report.verdict == "unknown"
    assert "reused nothing" in report.reason()


def test_a_server_that_says_nothing_is_not_called_exact():
    with standing_in(silent=True) as server:
        report = audited(server)
    assert report.verdict == "unknown"
    assert report.reason() == "the answers are empty"


CHOICE = {"index": 0, "text": "x"}


@pytest.mark.parametrize(
    "answer",
    [
        [],
        5,
        {"choices": 5},
        {"choices": []},
        {"choices": [{"text": None}]},
        {"choices": [{**CHOICE, "logprobs": {"tokens": [None], "token_logprobs": [-1.0]}}]},
        {"choices": [{**CHOICE, "logprobs": {"tokens": ["x"], "token_logprobs": [10**400]}}]},
        {"choices": [CHOICE], "usage": {"prompt_tokens": 10**400}},
        {"choices": [CHOICE], "usage": [1]},
        {"choices": [{**CHOICE, "logprobs": {"tokens": 5}}]},
        {"choices": [{**CHOICE, "logprobs": {"content": [{"token": []}]}}]},
        {"choices": [CHOICE], "usage": {"prompt_tokens_details": {"cached_tokens": "many"}}},
        {"choices": [{**CHOICE, "text": "\x1b[31m"}], "usage": {"prompt_tokens": -1.5}},
    ],
)
def test_an_answer_that_is_none_ends_in_a_typed_error_or_a_verdict(capsys, answer):
    with standing_in() as server:
        server.complete = lambda body: answer
        code, out, err = run(capsys, server.url, "-q", *OPTIONS)
    last = (out.splitlines() or err.splitlines())[-1]
    words = {0: r"EXACT: \d+ tokens are the same in every way", 2: "UNKNOWN: |kvpager: "}[code]
    assert re.match(words, last)
    assert "\x1b" not in out + err


def test_other_text_without_log_probabilities_is_not_called_corrupt():
    with standing_in(logprobs=False, restored=lambda state, restarts: state ^ 1) as server:
        report = audited(server)
    assert report.verdict == "unknown"
    with standing_in(logprobs=False) as server:
        report = audited(server)
    assert report.verdict == "exact"
    assert "log-probabilities" not in report.reason()


def test_a_restart_that_fails_ends_the_audit_with_what_was_found():
    with standing_in() as server:
        report = Report(server.url)
        plan = replace(SMALL, restart_command="echo no such service >&2; exit 3")
        with pytest.raises(AuditError, match="exit code 3: no such service"):
            audit(Server(server.url), plan, report, None)
    assert report.verdict == "unknown"
    assert results(report)["warm"] == "exact"


# What is sent.


def test_nothing_is_sent_through_a_proxy_or_after_a_redirect(monkeypatch):
    with standing_in() as proxy, standing_in() as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        audited(server)
        assert proxy.paths == []
        assert set(server.paths) == {"/v1/models", "/v1/completions"}


def test_the_load_is_bounded():
    with standing_in(seconds=0.01) as server:
        audited(server, concurrency=2, eviction_tokens=2000)
        texts = [body for body in server.asked if body["max_tokens"] == 1]
        assert server.busiest == 2
        assert len(server.asked) < 80
        assert len(texts) < 30


def test_filling_ends_when_what_came_before_is_gone():
    with standing_in(capacity=4000) as server:
        audited(server, eviction_tokens=1_000_000, prompt_tokens=400)
        assert len(server.asked) < 1000


# The command.


def run(capsys, *arguments):
    """Exit code, stdout and stderr."""
    code = main(["audit", *map(str, arguments)])
    return code, *capsys.readouterr()


OPTIONS = ("--prompts", 3, "--prompt-tokens", 160, "--max-tokens", 8, "--eviction-tokens", 0)


@pytest.mark.parametrize(
    ("behaviour", "code", "verdict"),
    [
        ({}, 0, "exact"),
        ({"restored": lambda state, restarts: state ^ 1}, 1, "corrupt"),
        ({"caches": False}, 2, "unknown"),
        ({"noise": 1e-3}, 3, "not exact"),
    ],
)
def test_the_exit_code_is_the_verdict(capsys, behaviour, code, verdict):
    with standing_in(**behaviour) as server:
        found, out, err = run(capsys, server.url, "--format", "json", "-q", *OPTIONS)
    told = json.loads(out)
    assert (found, told["verdict"], err) == (code, verdict, "")
    assert told["command"] == "audit"
    assert {"name", "result", "cached_tokens", "comparisons"} <= set(told["ways"][0])


def test_people_read_a_table_and_the_verdict(capsys):
    with standing_in(restored=lambda state, restarts: state ^ 1) as server:
        code, out, err = run(capsys, f"{server.url}/v1/", *OPTIONS)
    assert code == 1
    assert out.splitlines()[-1].startswith("CORRUPT: warm, prompt ")
    assert "rounding explains 0.15 nats" in out
    assert "in company" in err


def test_the_key_comes_from_the_environment_or_a_file(capsys, monkeypatch, tmp_path):
    seen = []
    with standing_in() as server:
        handler = server.http.RequestHandlerClass
        get = handler.do_GET
        monkeypatch.setattr(
            handler, "do_GET", lambda self: (seen.append(self.headers["authorization"]), get(self))
        )
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        run(capsys, server.url, *OPTIONS)
        monkeypatch.setenv("OPENAI_API_KEY", "of the environment\n")
        run(capsys, server.url, *OPTIONS)
        (tmp_path / "key").write_text("of a file\n")
        run(capsys, server.url, "--api-key-file", tmp_path / "key", *OPTIONS)
    assert seen == [None, "Bearer of the environment", "Bearer of a file"]


@pytest.mark.parametrize("key", ["sk-\nsecret", "sk-s\u20accret"])
def test_a_key_that_cannot_be_sent_is_not_shown(capsys, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    code, out, err = run(capsys, "http://127.0.0.1:9", *OPTIONS)
    assert (code, out) == (2, "")
    assert "the API key has characters" in err
    assert "sk-" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ftp://host"], "'ftp://host' is not the address"),
        (["host:8000"], "'host:8000' is not the address"),
        (["http://127.0.0.1:99999"], "99999"),
        (["http://host", "--max-tokens", "1"], "at least 2"),
        (["http://host", "--restart-timeout", "5"], "--restart-command"),
    ],
)
def test_a_wrong_command_line_is_told_in_a_line(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_server_that_is_not_there_is_exit_code_2(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, out, err = run(capsys, url, "-q")
    assert (code, out) == (2, "")
    assert "Connection refused" in err


@pytest.mark.parametrize("part", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_sends_a_byte_now_and_then_does_not_outlast_the_timeout(capsys, part):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(part)
                while True:
                    connection.sendall(b"x")
                    time.sleep(0.05)

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        code, _, err = run(capsys, url, "-q", "--timeout", "1")
    assert code == 2
    assert "no answer within 1 s" in err
    thread.join()


def test_an_interrupt_prints_what_was_found_so_far():
    with standing_in() as server:
        command = [sys.executable, "-m", "kvpager", "audit", server.url, "--prompts", "2"]
        arrived = threading.Event()
        behaviour_generate = server.generate

        def slow(prompt, body, **more):
            if body.get("stream"):
                arrived.set()
                threading.Event().wait(20)
            return behaviour_generate(prompt, body, **more)

        server.generate = slow
        process = subprocess.Popen(
            [*command, "--prompt-tokens", "160"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert arrived.wait(60)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=15)
    assert process.returncode == 130
    assert "warm" in out
    assert out.splitlines()[-1] == "UNKNOWN: interrupted"

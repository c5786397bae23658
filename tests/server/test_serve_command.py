"""`kvpager serve`: one table of options for flags, environment and YAML, and its refusals."""

from __future__ import annotations

import argparse
import logging
import socket

import pytest

from kvpager.cli import main, serve
from kvpager.cli.commands import parse
from kvpager.server.settings import ServerSettings


def settings(*arguments):
    """What a command line comes to, with its YAML file."""
    return serve.settings_of(parse(["serve", *arguments]))


@pytest.fixture
def yaml(tmp_path):
    def write(text):
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_without_options_the_defaults_hold(monkeypatch):
    monkeypatch.delenv("KVPAGER_PORT", raising=False)
    assert settings() == ServerSettings()


def test_flags_come_before_the_environment_and_that_before_the_file(monkeypatch, yaml):
    path = yaml("port: 1\nmax_waiting: 7\nstore-budget: 5GiB\nserved_model_name: [a, b]\n")
    assert settings("--config", path).port == 1
    monkeypatch.setenv("KVPAGER_PORT", "2")
    assert settings("--config", path).port == 2
    found = settings("--config", path, "--port", "3", "--no-page")
    assert (found.port, found.page) == (3, False)
    assert found.max_waiting == 7
    assert found.store_budget == 5 << 30
    assert found.served_model_name == ("a", "b")


def test_options_of_the_pager_may_stand_in_the_file_too(yaml):
    from kvpager.cli.pager_options import pager_config

    args = parse(["serve", "--config", yaml("kv_dtype: q8\npool_tokens: 4096\n")])
    serve.settings_of(args)
    config = pager_config(args)
    assert (config.kv_dtype, config.pool_tokens) == ("q8", 4096)


def test_off_is_a_word_in_the_file_as_it_is_on_the_command_line(yaml):
    args = parse(["serve", "--config", yaml("store: off\ntool_calls: off\npage: off\n")])
    found = serve.settings_of(args)
    assert found.page is False
    args = parse(["serve", "--config", yaml("page: true\n")])
    assert serve.settings_of(args).page is True


def refused(capsys, *arguments):
    code = main(["serve", *arguments])
    assert code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "99999"], "--port is 99999; expected an integer from 0 to 65535"),
        (["--prot", "1"], "did you mean --port"),
        (["--store-ttl", "soon"], "--store-ttl"),
        (["--tool-calls", "morse"], "--tool-calls is 'morse'"),
        (["--api-keys", "missing.yaml"], "--api-keys is 'missing.yaml'"),
        (["--on-corrupt", "ignore"], "--on-corrupt is 'ignore'"),
        (["--config", "missing.yaml"], "--config missing.yaml: No such file"),
        (["--model", "no-such-model"], "--model no-such-model"),
        (["--max-waiting", "-1"], "--max-waiting"),
    ],
)
def test_what_cannot_be_is_refused_by_option(capsys, arguments, says):
    assert says in refused(capsys, *arguments)


def test_a_file_names_its_unknown_option(capsys, yaml):
    assert "unknown 'prot'; did you mean port" in refused(capsys, "--config", yaml("prot: 1"))
    assert "expected a mapping" in refused(capsys, "--config", yaml("- 1"))
    assert "no YAML" in refused(capsys, "--config", yaml("a: ["))


def test_keys_and_a_folder_are_looked_at_before_a_model_is_loaded(capsys, yaml, monkeypatch):
    monkeypatch.setattr(serve, "load_model", None)
    here = ["--port", "0"]
    keys = yaml("- {kex: 1, tenant: a}")
    assert "has a field 'kex'" in refused(capsys, *here, "--api-keys", keys)
    assert "--store /proc/x: No such file" in refused(capsys, *here, "--store", "/proc/x")
    port = refused(capsys, "--config", yaml("port: many"))
    assert "port in --config" in port
    assert "is 'many'" in port


def test_a_misspelt_model_leaves_no_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    assert "no-such-model" in refused(capsys, "--model", "no-such-model")
    assert "no-such-model" in refused(capsys, "--model", "no-such-model", "--store", "here")
    assert list(tmp_path.iterdir()) == []


def test_quiet_logs_errors_alone_unless_a_level_is_given():
    assert settings().log_level == "info"
    assert settings("-q").log_level == "error"
    assert settings("-q", "--log-level", "debug").log_level == "debug"


def test_a_port_that_is_taken_is_named(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fast = ["--rows", "16", "--small-rows", "fixed", "--pool-tokens", "1024"]
        monkeypatch.setattr(serve, "load_model", None)  # it is looked at before
        handlers = logging.getLogger("kvpager").handlers[:]
        said = refused(capsys, "--port", str(port), "--store", "off", "-q", *fast)
    assert f"port are '127.0.0.1' and {port}; nothing can listen there" in said
    assert logging.getLogger("kvpager").handlers == handlers  # the log goes there no more


def test_listening_beyond_this_machine_without_keys_is_warned_of(capsys):
    args = argparse.Namespace(quiet=False)
    serve.check_exposure(args, ServerSettings(host="0.0.0.0"))
    assert "--api-keys" in capsys.readouterr().err
    serve.check_exposure(args, ServerSettings(host="127.0.0.1"))
    assert not capsys.readouterr().err

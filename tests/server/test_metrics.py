"""Metrics: vLLM's names, counts that are exact, and a dashboard that asks for what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from server.running import running, said, started

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "kvpager.json"
OF_VLLM = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "prompt_tokens",
    "generation_tokens",
    "prompt_tokens_cached",
    "request_success",
)


def values(server):
    """Samples by name and labels, without the model's."""
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny-coder"
            found[(sample.name, *labels.values())] = sample.value
    return found


def changed(before, after, name, *labels):
    return after.get((name, *labels), 0) - before.get((name, *labels), 0)


def test_names_are_those_of_vllm_with_another_prefix(server):
    server.chat("Hi")
    text = server.http.get("/metrics").text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert families >= {f"kvpager:{name}" for name in OF_VLLM}


def test_counts_are_those_of_the_answers(server):
    before = values(server)
    answer = server.chat("Write a class. " * 10, max_tokens=7)
    again = server.chat("Write a class. " * 10, max_tokens=7)
    after = values(server)
    usage = [answer.usage, again.usage]
    assert changed(before, after, "kvpager:generation_tokens_total") == 14
    assert changed(before, after, "kvpager:prompt_tokens_total") == sum(
        one.prompt_tokens for one in usage
    )
    assert changed(before, after, "kvpager:prompt_tokens_cached_total") == sum(
        one.prompt_tokens_details.cached_tokens for one in usage
    )
    assert changed(before, after, "kvpager:request_success_total", "length") == 2
    for name, count in (("time_to_first_token", 2), ("inter_token_latency", 12)):
        assert changed(before, after, f"kvpager:{name}_seconds_count") == count
    assert after["kvpager:num_requests_running",] == 0


def test_errors_are_counted_by_code(server):
    before = values(server)
    server.post("/v1/chat/completions", messages=[])
    server.post("/v1/chat/completions", messages=said("Hi"), model="none")
    after = values(server)
    assert changed(before, after, "kvpager:request_errors_total", "400") == 1
    assert changed(before, after, "kvpager:request_errors_total", "404") == 1


def test_restores_and_restored_tokens_are_counted(coder, tmp_path):
    with started(coder, tmp_path) as server:
        first = server.openai.responses.create(
            model="tiny-coder", input="Write a class.", max_output_tokens=30, temperature=0
        )
    with started(coder, tmp_path) as server:
        second = server.openai.responses.create(
            model="tiny-coder", input="Why?", previous_response_id=first.id, max_output_tokens=2
        )
        found = values(server)
    cached = second.usage.input_tokens_details.cached_tokens
    assert found["kvpager:restores_total", "exact"] == 1
    assert found["kvpager:restored_tokens_consumed_total",] == cached


def test_stores_are_told_by_tenant(engine, tmp_path):
    with running(engine, tmp_path) as server:
        server.chat("Hi", extra_body={"session_id": "a"})
        found = values(server)
    assert found["kvpager:store_bytes", "default"] > 0
    assert found["kvpager:bytes", "resident"] > 0


def test_with_keys_a_tenant_is_named_to_itself_alone(engine, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: ka, tenant: alice}\n- {key: kb, tenant: bob}\n")
    with running(engine, tmp_path / "store", api_keys=str(keys)) as server:
        for key, named in ((None, []), ("unknown", []), ("ka", ["alice"]), ("kb", ["bob"])):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            text = server.http.get("/metrics", headers=headers).text
            assert "kvpager:num_requests_running" in text
            assert [name for name in ("alice", "bob") if name in text] == named
        assert server.http.get("/health").json() == {"status": "ok"}


def test_the_dashboard_asks_for_metrics_that_exist(server):
    server.chat("Hi")
    server.post("/v1/chat/completions", messages=[])
    server.openai.responses.create(model="tiny-coder", input="Hi", max_output_tokens=1)
    text = server.http.get("/metrics").text
    exist = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    asked = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            asked |= set(re.findall(r"kvpager:\w+", target["expr"]))
    assert asked
    assert {name.removesuffix("_bucket") for name in asked} <= exist

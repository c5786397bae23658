"""The rule by which a request finds the server that holds most of its prompt."""

from __future__ import annotations

import json

from kvpager.server.routing import beginnings_of, preference


def chat(*texts):
    return json.dumps({"messages": [{"role": "user", "content": t} for t in texts]}).encode()


def test_a_longer_prompt_of_one_conversation_begins_as_the_shorter_one():
    first, second = beginnings_of(chat("a", "b"), "key"), beginnings_of(chat("a", "b", "c"), "key")
    assert [digest for digest, _ in second[:2]] == [digest for digest, _ in first]
    shares = [share for _, share in second]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_tenants_and_other_bodies_share_no_beginning():
    of_two = [{digest for digest, _ in beginnings_of(chat("a"), tenant)} for tenant in ("k1", "k2")]
    assert not of_two[0] & of_two[1]
    for body in (b"", b"{", b"[1]", b"7", b'{"messages": null}'):
        assert beginnings_of(body, "") == ()


def test_a_server_is_preferred_by_what_it_holds_less_what_it_runs():
    beginnings = beginnings_of(chat("a" * 50, "b", "c"), "key")
    held = {digest for digest, _ in beginnings_of(chat("a" * 50, "b"), "key")}
    whole = {digest for digest, _ in beginnings}
    ranked = sorted(
        [(held, 0), (whole, 0), (set(), 0), (whole, 10), (held, 5)],
        key=lambda server: preference(beginnings, *server, 10),
    )
    assert ranked == [(set(), 0), (whole, 10), (held, 5), (held, 0), (whole, 0)]

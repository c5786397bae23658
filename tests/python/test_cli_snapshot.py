"""`kvpager snapshot inspect`, `verify` and `diff`: what they tell of files, whole and damaged."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli_snapshots import (
    FINGERPRINT,
    FRONT,
    LAYOUT,
    C,
    Cell,
    files_below,
    flip,
    make_major,
    offset_of,
    refused,
    reseal,
    save_file,
    save_in,
    sequence,
    told,
    told_json,
)

from kvpager.pager import Layout
from kvpager.stores import DirectoryStore

CHUNK, SLICE = LAYOUT.chunk_bytes, LAYOUT.chunk_bytes // LAYOUT.layers


@pytest.fixture
def file(tmp_path):
    """50 tokens: three sealed chunks and a tail of two."""
    return save_file(tmp_path / "turn1.kvsnap", 50)


@pytest.fixture
def store(tmp_path):
    """Two turns of one session."""
    store = DirectoryStore(tmp_path / "store")
    save_in(store, "turn1", 50)
    save_in(store, "turn2", 90)
    return store


def damage_pack(store, chunk, layer):
    """Flips a bit of the pack that holds turn1's chunks."""
    pack, _ = store.open("turn1").packs[0]
    flip(store_path(store) / "packs" / f"{pack}.kvsnap", FRONT + chunk * CHUNK + layer * SLICE)


def store_path(store):
    return Path(store.path)


CONVERSATION = {
    "pending": None,
    "sampling": {"seed": 3, "temperature": 0.5},
    "conversation": {
        "messages": [
            {"role": "user", "content": "What is\na KV cache?"},
            {"role": "assistant", "content": "Keys and values. " * 20},
        ]
    },
}


def test_a_session_is_told_in_words_and_a_long_message_is_cut(capsys, tmp_path):
    file = save_file(tmp_path / "chat.kvsnap", 50, session=CONVERSATION)
    said = told(capsys, "snapshot", "inspect", file)
    assert re.search(r'^  conversation +2 messages\n    user +"What is a KV cache\?"$', said, re.M)
    assert re.search(r'^    assistant +"Keys and values\. .*values\. \.\.\."$', said, re.M)
    assert re.search(r"^  sampling +seed 3, temperature 0\.5$", said, re.M)
    assert re.search(r"^  pending +none$", said, re.M)


def test_a_difference_of_two_sessions_is_told_in_words(capsys, tmp_path):
    first = save_file(tmp_path / "a.kvsnap", 50, session=CONVERSATION)
    other = {
        "pending": 7,
        "sampling": {"seed": 4, "temperature": 0.5},
        "conversation": {"messages": [{"role": "user", "content": "Hello"}]},
    }
    second = save_file(tmp_path / "b.kvsnap", 50, session=other)
    said = " ".join(told(capsys, "snapshot", "diff", first, second).split())
    assert "session pending: none / 7 (no part of the digest)" in said
    assert "session sampling: seed 3 / 4 (no" in said
    told_messages = 'number 1, "What is a KV cache?" / "Hello"'
    assert f"conversation: 2 messages / 1 message, first different: {told_messages}" in said


@pytest.mark.parametrize("content", [b"", b"a text", b"GGUF" + bytes(9000)])
def test_what_is_no_snapshot_is_not_called_a_corrupt_one(capsys, tmp_path, content):
    file = tmp_path / "notes.kvsnap"
    file.write_bytes(content)
    said = [
        refused(capsys, "snapshot", "inspect", file),
        refused(capsys, "snapshot", "diff", file, file, code=3),
        told(capsys, "snapshot", "verify", file, code=1),
    ]
    assert ["not a kvpager snapshot" in one for one in said] == [True] * 3
    assert ["corrupt" in one for one in said] == [False] * 3


def test_a_snapshot_that_was_cut_off_is_a_corrupt_one(capsys, file):
    file.write_bytes(file.read_bytes()[:1000])
    assert "corrupt snapshot: file size is 1000" in refused(capsys, "snapshot", "inspect", file)


# Addresses.


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("store/trun1", "did you mean turn1 or turn2?"),
        ("store/zzz", "it has turn1, turn2"),
        ("turm1.kvsnap", "no such file; did you mean turn1.kvsnap?"),
        ("store", "a whole store; expected one snapshot of it, store/NAME; it has turn1, turn2"),
        (".", "a folder, and no store"),
        ("no/x.kvsnap", "there is no folder no"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_the_closest_there_is(
    capsys, file, store, monkeypatch, address, words
):
    monkeypatch.chdir(file.parent)
    assert words in refused(capsys, "snapshot", "inspect", address)


def test_a_snapshot_in_a_store_is_found_by_name_with_and_without_suffix(capsys, store):
    path = store_path(store) / "snapshots" / "turn1.kvsnap"
    for name in (f"{store.path}/turn1", f"{store.path}/turn1.kvsnap", path):
        assert told_json(capsys, "snapshot", "inspect", name)["tokens"] == 50


# inspect.


def test_inspect_tells_a_files_sizes_layout_ledger_and_rules(capsys, file):
    values = told_json(capsys, "snapshot", "inspect", file)
    assert (values["kind"], values["format"]) == ("self-contained", "1.0")
    assert (values["tokens"], values["sealed_chunks"], values["tail_tokens"]) == (50, 3, 2)
    assert (values["file_bytes"], values["shared_bytes"]) == (file.stat().st_size, 0)
    assert values["layout"] == {
        "layers": 2,
        "kv_heads": 2,
        "k_dim": 32,
        "v_dim": 32,
        "chunk_tokens": C,
        "k_dtype": "float32",
        "v_dtype": "float32",
        "chunk_bytes": CHUNK,
        "slice_bytes": SLICE,
    }
    assert values["fingerprint"] == FINGERPRINT
    rules = {"weights": "refuse", "torch_version": "waivable", "rows": "waivable"}
    assert values["fingerprint_rules"] == rules
    assert values["ledger"]["provenance"] == {"exact": 4}
    assert values["packs"] == []
    text = told(capsys, "snapshot", "inspect", file)
    assert values["logical_digest"] in text
    assert " *torch_version" in text
    assert "  weights" in text
    assert "4 exact" in text
    assert max(map(len, text.replace(str(file), "turn.kvsnap").splitlines())) <= 100


def test_inspect_tells_what_a_snapshot_shares_with_others(capsys, store):
    values = told_json(capsys, "snapshot", "inspect", f"{store.path}/turn2")
    assert (values["kind"], values["format"]) == ("manifest", "1.0")
    assert [(pack["used"], pack["chunks"]) for pack in values["packs"]] == [(3, 3), (2, 2)]
    for pack in values["packs"]:
        path = store_path(store) / "packs" / f"{pack['id']}.kvsnap"
        assert pack["file_bytes"] == path.stat().st_size
    assert values["shared_bytes"] == 5 * CHUNK + values["summary_bytes"]
    text = told(capsys, "snapshot", "inspect", f"{store.path}/turn2")
    assert f"{values['packs'][0]['id']}  3 of 3 chunks" in text


def test_inspect_says_of_a_pack_that_it_is_one(capsys, store):
    pack = next((store_path(store) / "packs").glob("*.kvsnap"))
    assert told_json(capsys, "snapshot", "inspect", pack)["kind"] == "pack"


def test_inspect_draws_scores_that_a_session_really_had(capsys, tmp_path):
    """Scores come from attention, so that a sequence that attended has them."""
    path = tmp_path / "scored.kvsnap"
    with sequence(48) as made:
        pager = made.pager
        random = np.random.default_rng(1)
        ids = np.arange(C)
        with pager.begin([made] * C, range(48, 64), ids, [0] * C) as forward:
            for layer in range(2):
                q = random.standard_normal((C, 4, 32), dtype=np.float32)
                k, v = random.standard_normal((2, C, 2, 32), dtype=np.float32)
                forward.attend(layer, q, k, v, scaling=0.2)
            forward.commit()
        scores = [chunk.qk_score for chunk in made.ledger()]
        made.save(path)
    values = told_json(capsys, "snapshot", "inspect", path)
    assert max(scores) > 0
    assert values["ledger"]["score"]["most"] == max(scores)
    assert values["ledger"]["score"]["most_at_chunk"] == scores.index(max(scores))
    text = told(capsys, "snapshot", "inspect", path)
    assert "square-root scale" in text
    assert "columns per chunk: 8" in text


def test_inspect_draws_a_png_where_told(capsys, file, tmp_path):
    plot = tmp_path / "picture.png"
    told(capsys, "snapshot", "inspect", file, "--plot", plot)
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    err = refused(capsys, "snapshot", "inspect", file, "--plot", tmp_path / "no" / "x.png")
    assert "--plot" in err


def test_without_the_extra_a_picture_is_refused_and_all_else_is_shown(
    capsys, file, tmp_path, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    plot = tmp_path / "picture.png"
    err = refused(capsys, "snapshot", "inspect", file, "--plot", plot)
    assert f"--plot {plot} needs matplotlib; pip install 'kvpager[plots]'" in err
    assert not plot.exists()
    assert "tokens" in told(capsys, "snapshot", "inspect", file)


# verify.


def test_verify_reads_every_byte_of_a_whole_file(capsys, file):
    values = told_json(capsys, "snapshot", "verify", file)
    assert values["whole"] is True
    assert values["damage"] == []
    assert values["bytes_read"] == file.stat().st_size
    text = told(capsys, "snapshot", "verify", file, "--threads", 2)
    assert "every byte is what was written" in text
    assert re.search(r"[\d,]+ MB/s with 2 threads", text)


def test_verify_lists_all_damage_with_chunk_tokens_and_layer(capsys, file):
    flip(file, FRONT + 1 * CHUNK + 1 * SLICE + 5)
    flip(file, FRONT + 3 * CHUNK + 0 * SLICE)
    flip(file, FRONT + 4 * CHUNK + 3)  # the summary of chunk 0
    values = told_json(capsys, "snapshot", "verify", file, code=1)
    found = {
        (part["chunk"], part["start"], part["stop"], part["layer"]) for part in values["damage"]
    }
    assert found == {(0, 0, 16, None), (1, 16, 32, 1), (3, 48, 50, 0)}
    text = told(capsys, "snapshot", "verify", file, code=1)
    assert "DAMAGED: 3 parts" in text
    assert "chunk 1 (tokens [16, 32)), layer 1" in text
    assert "summary" in text


GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.kvsnap")), ids=lambda path: path.name)
def test_golden_files_are_whole_and_of_the_one_format(capsys, path):
    told(capsys, "snapshot", "verify", path)
    values = told_json(capsys, "snapshot", "inspect", path)
    assert values["format"] == "1.0"
    assert values["kind"] in ("self-contained", "manifest", "pack")


@pytest.mark.parametrize("size", [0, 5000])
def test_a_truncated_file_is_damaged(capsys, file, size):
    data = file.read_bytes()
    file.write_bytes(data[:size])
    values = told_json(capsys, "snapshot", "verify", file, code=1)
    assert values["kind"] is None
    assert [part["chunk"] for part in values["damage"]] == [None]
    text = told(capsys, "snapshot", "verify", file, code=1)
    assert "cannot be opened" in " ".join(text.split())


def test_what_could_not_be_checked_is_not_called_damaged(capsys, file, tmp_path):
    for address in (tmp_path / "none.kvsnap", tmp_path):
        assert str(address) in refused(capsys, "snapshot", "verify", address, code=3)
    make_major(file, 2)
    assert "version" in refused(capsys, "snapshot", "verify", file, code=3)


def test_verify_of_a_store_reads_each_pack_once(capsys, store):
    values = told_json(capsys, "snapshot", "verify", store.path)
    files = list(store_path(store).rglob("*.kvsnap"))
    assert (values["snapshots"], values["packs"]) == (2, 2)
    assert values["bytes_read"] == sum(path.stat().st_size for path in files)
    words = " ".join(told(capsys, "snapshot", "verify", store.path).split())  # a long path wraps
    assert "2 snapshots, 2 packs" in words


def damage_of(capsys, address):
    """(snapshot, chunk, layer) of all that `verify` finds."""
    values = told_json(capsys, "snapshot", "verify", address, code=1)
    return [(part["snapshot"], part["chunk"], part["layer"]) for part in values["damage"]]


def test_verify_of_a_store_names_every_snapshot_that_damage_concerns(capsys, store):
    damage_pack(store, chunk=2, layer=1)
    assert damage_of(capsys, store.path) == [("turn1", 2, 1), ("turn2", 2, 1)]
    text = told(capsys, "snapshot", "verify", store.path, code=1)
    assert "turn1: the checksum of chunk 2 (tokens [32, 48)), layer 1" in text
    for path in (store_path(store) / "snapshots").iterdir():
        path.unlink()
    assert damage_of(capsys, store.path) == [(None, 2, 1)]  # which no snapshot needs


def test_verify_of_a_store_finds_a_damaged_tail_and_a_missing_pack(capsys, store):
    flip(store_path(store) / "snapshots" / "turn2.kvsnap", FRONT)
    assert damage_of(capsys, store.path) == [("turn2", 5, 0)]
    pack, _ = store.open("turn1").packs[0]
    (store_path(store) / "packs" / f"{pack}.kvsnap").unlink()
    assert damage_of(capsys, store.path) == [("turn1", None, None), ("turn2", None, None)]
    values = told_json(capsys, "snapshot", "verify", f"{store.path}/turn1", code=1)
    assert pack in values["damage"][0]["message"]


def test_a_pack_whose_tables_are_damaged_does_not_make_its_chunks_so(capsys, store):
    pack, _ = store.open("turn1").packs[0]
    path = store_path(store) / "packs" / f"{pack}.kvsnap"
    flip(path, path.stat().st_size - 3)
    values = told_json(capsys, "snapshot", "verify", store.path, code=1)
    (part,) = values["damage"]
    assert (part["file"], part["snapshot"], part["chunk"]) == (str(path), None, None)


def test_a_pack_swapped_for_another_sound_one_is_damage(capsys, tmp_path):
    """Both files are whole by themselves; only the manifest knows better."""
    stores = [DirectoryStore(tmp_path / name) for name in "ab"]
    for seed, store in enumerate(stores):
        save_in(store, "turn", 48, seed=seed)
    packs = [next((store_path(store) / "packs").glob("*.kvsnap")) for store in stores]
    packs[0].write_bytes(packs[1].read_bytes())
    found = damage_of(capsys, stores[0].path)
    assert found == [("turn", chunk, layer) for chunk in range(3) for layer in (0, 1, None)]


@pytest.mark.parametrize("address", ["{}", "{}/turn1"], ids=["the store", "one snapshot"])
def test_damage_that_verify_found_is_written_again_by_the_next_save(capsys, store, address):
    damage_pack(store, chunk=1, layer=0)
    told(capsys, "snapshot", "verify", address.format(store.path), code=1)
    report = save_in(DirectoryStore(store.path), "turn3", 50)
    assert report.chunks_written == 1 + 1  # the damaged one and the tail
    told(capsys, "snapshot", "verify", f"{store.path}/turn3")


# diff.


def test_diff_of_equal_snapshots_names_the_common_digest(capsys, store, tmp_path):
    file = save_file(tmp_path / "copy.kvsnap", 50, session={"pending": 8})
    values = told_json(capsys, "snapshot", "diff", f"{store.path}/turn1", file)
    assert values["equal"] is True
    assert values["payload"]["slices"] == 0
    assert values["session"]["pending"] == [7, 8]
    text = told(capsys, "snapshot", "diff", f"{store.path}/turn1", file)
    assert text.startswith("equal")
    assert values["logical_digest"][0] in text
    assert "no part of the digest" in text


MIXED = Layout(3, 2, 32, 48, chunk_tokens=C, k_dtype="bfloat16", v_dtype="float16")


@pytest.mark.parametrize("layout", [LAYOUT, MIXED], ids=["float32", "bfloat16 and float16"])
@pytest.mark.parametrize("part", ["K", "V"])
@pytest.mark.parametrize("place", [(0, 0, 0, 0, 0), (1, 1, 1, 7, 31), (3, 0, 1, 1, 13)])
def test_diff_finds_one_flipped_bit_of_one_element(capsys, tmp_path, layout, part, place):
    chunk, layer, head, row, index = place
    cell = Cell(chunk, layer, part, head, row, index)
    a = save_file(tmp_path / "a.kvsnap", 50, layout=layout)
    b = tmp_path / "b.kvsnap"
    b.write_bytes(a.read_bytes())
    flip(b, offset_of(cell, layout), bit=1)
    reseal(b, layout)
    told(capsys, "snapshot", "verify", b)
    values = told_json(capsys, "snapshot", "diff", a, b, code=1)
    payload = values["payload"]
    assert (payload["chunks"], payload["slices"]) == (1, 1)
    assert (payload["chunks_compared"], payload["slices_compared"]) == (4, 4 * layout.layers)
    first = SimpleNamespace(**payload["first"])
    where = Cell(first.chunk, first.layer, first.part, first.head, first.row, first.index)
    assert where == cell
    assert first.token == chunk * C + row
    dtype = layout.k_dtype if part == "K" else layout.v_dtype
    assert int(first.a_bits, 16) ^ int(first.b_bits, 16) == 2
    assert _value(first.a_bits, dtype) == first.a
    assert _value(first.b_bits, dtype) == first.b
    text = told(capsys, "snapshot", "diff", a, b, code=1)
    assert f"token {first.token} (chunk {chunk}, row {row}), layer {layer}, {part}" in text
    assert first.a_bits in text
    assert first.b_bits in text


def _value(bits, dtype):
    """The element again, by another way than the command's."""
    raw = bytes.fromhex(bits[2:])
    if dtype == "bfloat16":
        return struct.unpack(">f", raw + b"\0\0")[0]
    return struct.unpack(">e" if dtype == "float16" else ">f", raw)[0]


@pytest.mark.parametrize(
    ("longer", "changes", "first", "counts"),
    [
        # Of one token the lower layer comes first.
        (50, ["V 1 21 1 5", "V 0 21 1 6", "K 0 40 0 0"], "V 0 21 1 6", (2, 3)),
        # Of one slice the lowest row, then keys, then the lowest head.
        (
            50,
            ["K 0 25 0 0", "V 0 20 0 1", "K 0 20 0 3", "K 0 20 1 0", "V 0 22 1 2"],
            *("K 0 20 0 3", (1, 1)),
        ),
        # The first token counts even where a lower layer differs later.
        (50, ["K 0 30 0 0", "K 1 17 1 3"], "K 1 17 1 3", (1, 2)),
        # Of an unequal tail the rows that both have.
        (60, ["K 1 49 0 2"], "K 1 49 0 2", (1, 1)),
    ],
)
def test_diff_tells_the_first_element_and_its_value(
    capsys, tmp_path, longer, changes, first, counts
):
    def change(ids, k, v):
        for part, *place in map(str.split, changes):
            (k if part == "K" else v)[tuple(map(int, place))] = 9.0

    a = save_file(tmp_path / "a.kvsnap", 50)
    b = save_file(tmp_path / "b.kvsnap", longer, change=change)
    payload = told_json(capsys, "snapshot", "diff", a, b, code=1)["payload"]
    found = payload["first"]
    place = (found[name] for name in ("part", "layer", "token", "head", "index"))
    assert " ".join(map(str, place)) == first
    assert found["b"] == 9.0
    assert (payload["chunks"], payload["slices"]) == counts


def test_diff_tells_the_first_token_id_that_differs(capsys, tmp_path):
    def change(ids, k, v):
        ids[33] += 1

    a = save_file(tmp_path / "a.kvsnap", 50)
    b = save_file(tmp_path / "b.kvsnap", 50, change=change)
    values = told_json(capsys, "snapshot", "diff", a, b, code=1)
    tokens = values["tokens"]
    assert tokens["first_difference"] == 33
    assert tokens["b"] == tokens["a"] + 1
    assert values["payload"]["slices"] == 0
    assert values["records"]["chain_hash"] == {"chunks": 1, "first_chunk": 2}
    assert "position 33" in told(capsys, "snapshot", "diff", a, b, code=1)


@pytest.mark.parametrize(("short", "long"), [(50, 90), (48, 50)])
def test_a_turn_and_its_next_differ_in_length_alone(capsys, tmp_path, short, long):
    a = save_file(tmp_path / "a.kvsnap", short)
    b = save_file(tmp_path / "b.kvsnap", long)
    values = told_json(capsys, "snapshot", "diff", a, b, code=1)
    assert values["tokens"]["count"] == [short, long]
    assert values["tokens"]["first_difference"] == short
    assert (values["payload"]["chunks"], values["payload"]["first"]) == (0, None)
    text = told(capsys, "snapshot", "diff", a, b, code=1)
    assert "equal as far as both go" in text
    assert "equal in all positions that both have" in text


def test_diff_tells_fingerprint_fields_with_their_rules(capsys, tmp_path):
    a = save_file(tmp_path / "a.kvsnap", 50)
    other = {**FINGERPRINT, "torch_version": "2.14.0", "weights": "4567"}
    b = save_file(tmp_path / "b.kvsnap", 50, fingerprint=other)
    fields = told_json(capsys, "snapshot", "diff", a, b, code=1)["fingerprint"]
    assert fields == {
        "torch_version": {"a": "2.13.0", "b": "2.14.0", "rule": "waivable"},
        "weights": {"a": "0123", "b": "4567", "rule": "refuse"},
    }
    text = told(capsys, "snapshot", "diff", a, b, code=1)
    assert "2 fields differ" in text
    assert "weights: '0123' / '4567' (refuse)" in text


def test_diff_of_other_layouts_does_not_compare_payload(capsys, tmp_path):
    a = save_file(tmp_path / "a.kvsnap", 50)
    b = save_file(tmp_path / "b.kvsnap", 50, layout=replace(LAYOUT, k_dtype="bfloat16"))
    values = told_json(capsys, "snapshot", "diff", a, b, code=1)
    assert values["layout"]["k_dtype"] == ["float32", "bfloat16"]
    assert values["payload"] is None
    assert "not compared" in told(capsys, "snapshot", "diff", a, b, code=1)


def test_diff_of_provenance_alone_says_so(capsys, tmp_path):
    a = save_file(tmp_path / "a.kvsnap", 50)
    b = save_file(tmp_path / "b.kvsnap", 50, provenance="decode")
    assert "provenance   differs in 4 chunks, first 0" in told(
        capsys, "snapshot", "diff", a, b, code=1
    )


def test_diff_reads_only_slices_that_can_differ(tmp_path):
    from kvpager.cli.snapshot.address import find_snapshot
    from kvpager.cli.snapshot.diff import compare
    from kvpager.cli.snapshot.opened import Opened

    def change(ids, k, v):
        k[1, 20, 0, 0] = 3.0

    a = save_file(tmp_path / "a.kvsnap", 50)
    b = save_file(tmp_path / "b.kvsnap", 50, change=change)
    one, other = (Opened.at(find_snapshot(str(path))) for path in (a, b))
    compare(one, other)
    assert (one.reader.payload_bytes_read, other.reader.payload_bytes_read) == (SLICE, SLICE)
    compare(one, Opened.at(find_snapshot(str(a))))
    assert one.reader.payload_bytes_read == SLICE


def test_diff_that_cannot_be_made_is_neither_equal_nor_different(capsys, tmp_path):
    def change(ids, k, v):
        k[1, 20, 0, 0] = 3.0

    a = save_file(tmp_path / "a.kvsnap", 50)
    b = save_file(tmp_path / "b.kvsnap", 50, change=change)
    refused(capsys, "snapshot", "diff", a, tmp_path / "c.kvsnap", code=3)
    flip(b, FRONT + CHUNK + SLICE)
    err = refused(capsys, "snapshot", "diff", a, b, code=3)
    assert "layer 1" in err
    b.write_bytes(b.read_bytes()[:4000])
    refused(capsys, "snapshot", "diff", a, b, code=3)
    assert files_below(tmp_path) == ["a.kvsnap", "b.kvsnap"]

"""Damage of every kind, at every kind of byte, in every kind of file.

Damage is a typed error at open, or at the first read of what it hit; never a crash, never wrong
data, and a pager that tries to restore the file is as it was.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from anatomy import (
    CHUNKS,
    ENTRY,
    ENTRY_FIELDS,
    FINGERPRINT,
    FRONT,
    HEADER,
    LAYOUT,
    LAYOUT_FIELDS,
    PACKS,
    PAYLOAD,
    SUMMARIES,
    TOKENS,
    Section,
    flipped,
    get,
    put_together,
    regions,
    take_apart,
)
from forgeries import (
    FORGERIES,
    JSON_ATTACKS,
    JSON_SECTIONS,
    claims_of_terabytes,
    forged,
    numbers_for,
    with_json,
)
from specimens import (
    DIM,
    KINDS,
    LAYERS,
    PACK_IDS,
    UNDER_ADDRESS_SANITIZER,
    C,
    bytes_of,
    fill,
    listing,
    make_pager,
    open_descriptors,
    write_single,
)
from specimens import TOKENS as LENGTH

from kvpager import _core
from kvpager.config import TopK
from kvpager.errors import (
    CorruptSnapshotError,
    FingerprintMismatchError,
    InvalidArgumentError,
    StorageError,
    UnsupportedVersionError,
)
from kvpager.pager import open_snapshot

REFUSED = (CorruptSnapshotError, UnsupportedVersionError)
# Chunks of the manifest that lie in pack 0, in its order.
IN_PACK = {0: 0, 1: 2}


def refusal(path):
    """What opening says; None if it opens."""
    try:
        open_snapshot(path)
    except (*REFUSED, StorageError) as error:
        return error
    return None


def damage(path):
    """What reading everything says: {(chunk, layer)}, layer -1 for a summary."""
    found = _core.SnapshotReader.open(str(path)).verify(1)
    return {(chunk, -1 if layer is None else layer) for chunk, layer, _ in found}


def blamed(region, kind):
    """The (chunk, layer) of the file that damage in this region of its bulk is blamed on."""
    name, _, index = region.rstrip("]").partition("[")
    n = int(index)
    own, layer = (n // LAYERS, n % LAYERS) if name == "payload" else (n, -1)
    return (LENGTH // C if kind == "manifest" else own), layer  # which holds the tail alone


def by_manifest(found):
    """Damage of pack 0 as a manifest over it has it."""
    return {(IN_PACK[chunk], layer) for chunk, layer in found}


class Patch:
    """A file that is damaged in place and made whole again."""

    def __init__(self, path):
        self.path = path
        self.raw = path.read_bytes()
        self.fd = os.open(path, os.O_RDWR)

    def __enter__(self):
        return self

    def write(self, at, data):
        assert os.pwrite(self.fd, data, at) == len(data)

    def restore(self, at, count):
        self.write(at, self.raw[at : at + count])

    def replace(self, data):
        os.ftruncate(self.fd, len(data))
        self.write(0, data)

    def __exit__(self, *_):
        self.replace(self.raw)
        os.close(self.fd)


@pytest.fixture
def files(specimens, tmp_path):
    """Copies to damage."""
    return specimens.copy(tmp_path)


# attacks 1, 2, 3, 4, 5, 6, 14
@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_of_any_file_can_be_flipped_unnoticed(files, bystander, kind):
    before, path = bystander.state(), files.path(kind)
    dice = random.Random(kind)
    seen = set()
    with Patch(path) as patch:
        for name, start, stop in regions(patch.raw):
            section = name.partition("[")[0]
            bulk = section in ("payload", "summaries")
            seen.add(section.partition(".")[0])
            for at in range(start, stop):
                patch.write(at, bytes([patch.raw[at] ^ (1 << dice.randrange(8))]))
                error = refusal(path)
                if not bulk:
                    assert isinstance(error, REFUSED), f"{name}: byte {at} went unseen"
                    assert str(path) in str(error)
                else:
                    assert error is None, f"{name}: byte {at}: {error}"
                    assert damage(path) == {blamed(name, kind)}, f"{name}: byte {at}"
                patch.restore(at, 1)
    assert {"header", "table", "layout", "fingerprint", "session", "tokens", "chunks"} <= seen
    assert {"payload"} | ({"summaries"} if kind != "manifest" else {"packs"}) <= seen
    assert not damage(path)
    assert bystander.state() == before


# attacks 1, 2, 3, 4, 5, 6, 14
def test_a_byte_flipped_in_a_pack_never_changes_what_its_manifest_gives(files, specimens):
    """Header, table and sizes are checked at open. Metadata of a pack the manifest has itself."""
    sound = _core.SnapshotReader.open(str(specimens.manifest))
    expected = [bytes(sound.read_chunk(c)) for c in range(sound.chunks)]
    dice = random.Random(1)
    with Patch(files.pack()) as patch:
        for name, start, stop in regions(patch.raw):
            for at in {start, stop - 1, *(dice.randrange(start, stop) for _ in range(8))}:
                patch.write(at, bytes([patch.raw[at] ^ (1 << dice.randrange(8))]))
                error = refusal(files.manifest)
                if error is not None:
                    assert isinstance(error, REFUSED)
                    assert files.pack().name in str(error)
                elif name.startswith(("payload", "summaries")):
                    found = damage(files.manifest)
                    assert found == by_manifest({blamed(name, "pack")}), f"{name}: byte {at}"
                else:
                    assert not name.startswith(("header", "table"))
                    reader = _core.SnapshotReader.open(str(files.manifest))
                    assert [bytes(reader.read_chunk(c)) for c in range(reader.chunks)] == expected
                patch.restore(at, 1)


# attacks 5, 13
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_met_when_its_chunk_is_read_and_other_chunks_are_the_saved_ones(
    files, specimens, bystander, kind
):
    opened = files.single if kind == "self-contained" else files.manifest
    saver = make_pager()
    sound = saver.restore(saver.open_snapshot(specimens.single))
    whole = [[bytes_of(t) for t in sound.read_kv(n, 0, LENGTH)] for n in range(LAYERS)]
    pager = make_pager()  # whose chunks come from the damaged file alone
    dice = random.Random(kind)
    met = 0
    with Patch(files.path(kind)) as patch:
        for name, start, stop in regions(patch.raw):
            if not name.startswith("payload"):
                continue
            chunk, layer = blamed(name, kind)
            chunk = IN_PACK[chunk] if kind == "pack" else chunk
            at = dice.randrange(start, stop)
            patch.write(at, bytes([patch.raw[at] ^ 0x40]))
            met += 1
            if chunk == LENGTH // C:  # a tail is read by the restore itself
                before = bystander.state()
                with pytest.raises(CorruptSnapshotError, match=rf"chunk {chunk} .*layer {layer}"):
                    bystander.pager.restore(bystander.pager.open_snapshot(opened))
                assert bystander.state() == before
            else:
                session = pager.restore(pager.open_snapshot(opened))
                check_all_but(session, (chunk, layer), whole)
                session.close()
                pager.check_invariants()
                pager.close()
                pager = make_pager()
            patch.restore(at, 1)
    assert met == LAYERS * {"self-contained": 4, "pack": 2, "manifest": 1}[kind]
    pager.close()
    saver.close()


def check_all_but(session, damaged, whole):
    """Every slice reads as it was saved, but for one, which says that it does not."""
    for layer in range(LAYERS):
        for c in range(LENGTH // C):
            if (c, layer) == damaged:
                with pytest.raises(CorruptSnapshotError) as met:
                    session.read_kv(layer, c * C, (c + 1) * C)
                assert (met.value.chunk, met.value.layer) == damaged
                assert f"tokens [{c * C}, {c * C + C})" in str(met.value)
                continue
            for ours, theirs in zip(session.read_kv(layer, c * C, (c + 1) * C), whole[layer]):
                part = len(theirs) * C // LENGTH
                assert bytes_of(ours) == theirs[c * part : (c + 1) * part]


# attack 6
def test_a_damaged_summary_is_made_again_from_its_chunk_or_stops_who_needs_it(files):
    raw = files.single.read_bytes()
    at = {name: start for name, start, _ in regions(raw)}
    q = np.random.default_rng(1).standard_normal((2, DIM), dtype=np.float32)
    selection = TopK(chunks=1, sinks=C, recent=C)

    def restored(content):
        files.single.write_bytes(content)
        pager = make_pager(selection=selection)
        return pager, pager.restore(pager.open_snapshot(files.single))

    sound_pager, sound = restored(raw)
    expected = [sound.select(layer, q) for layer in range(LAYERS)]
    pager, session = restored(flipped(raw, at["summaries[1]"] + 3))
    assert [session.select(layer, q) for layer in range(LAYERS)] == expected
    assert pager.stats()["summaries_rebuilt"] == 1
    # Nothing to make it from: chunk 1 is damaged as well.
    worse_pager, worse = restored(
        flipped(flipped(raw, at["summaries[1]"] + 3), at["payload[2]"] + 1)
    )
    before = worse.tokens.tolist()
    with pytest.raises(CorruptSnapshotError, match="chunk 1"):
        worse.select(0, q)
    assert worse.tokens.tolist() == before
    for one, its in ((sound, sound_pager), (session, pager), (worse, worse_pager)):
        one.close()
        its.check_invariants()
        its.close()


# attack 7
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_off_anywhere_is_refused(files, bystander, kind):
    before, opened = bystander.state(), files.path(kind)
    with Patch(files.path(kind)) as patch:
        edges = {at for _, start, stop in regions(patch.raw) for at in (start, stop)}
        cuts = {at + d for at in edges for d in (-1, 0, 1)} | set(range(0, len(patch.raw), 97))
        for size in sorted(c for c in cuts if 0 <= c < len(patch.raw)):
            patch.replace(patch.raw[:size])
            assert isinstance(refusal(opened), CorruptSnapshotError), size
    assert bystander.state() == before


# attack 8
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_something_after_its_end_is_refused(files, kind):
    with Patch(files.path(kind)) as patch:
        for more in (b"\0", b"x", bytes(64), bytes(1 << 20), patch.raw):
            patch.replace(patch.raw + more)
            assert isinstance(refusal(files.path(kind)), CorruptSnapshotError), len(more)


# attacks 9, 10
@pytest.mark.parametrize("kind", KINDS)
def test_ranges_filled_with_zeros_are_noticed(files, kind):
    opened = files.path(kind)
    with Patch(files.path(kind)) as patch:
        spans = [(name, start, stop) for name, start, stop in regions(patch.raw)]
        spans += [("front", 0, FRONT), ("all", 0, len(patch.raw))]
        spans += [(f"sector at {at}", at, at + 512) for at in range(0, len(patch.raw), 512)]
        zeroed = 0
        for name, start, stop in spans:
            if not any(patch.raw[start:stop]):
                continue
            zeroed += 1
            patch.write(start, bytes(min(stop, len(patch.raw)) - start))
            error = refusal(opened)
            assert isinstance(error, REFUSED) or (error is None and damage(opened)), name
            patch.restore(start, stop - start)
        assert zeroed > 40


# attacks 11, 12
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_snapshot_is_refused_by_name(files, kind):
    noise = random.Random(1).randbytes(20_000)
    with Patch(files.path(kind)) as patch:
        for content in (
            b"",
            b"\x89",
            noise[:63],
            noise[:4095],
            noise,
            b"GGUF" + noise,
            bytes(9000),
        ):
            patch.replace(content)
            error = refusal(files.path(kind))
            assert isinstance(error, CorruptSnapshotError)
            assert str(patch.path) in str(error)
            assert ("header.magic" if len(content) >= FRONT else "file size") in str(error)


@pytest.mark.parametrize(
    ("number", "kind"), [(n, kind) for kind in KINDS for n in numbers_for(kind)]
)
# attacks 15 to 40
def test_a_forgery_with_checksums_that_agree_is_refused_by_name(files, bystander, number, kind):
    import re

    before, opened, path = bystander.state(), files.path(kind), files.path(kind)
    raw = path.read_bytes()
    attempts = forged(number, kind, raw)
    assert attempts
    for label, content, names in attempts:
        path.write_bytes(content)
        if content == raw:
            continue
        error = refusal(opened)
        if error is None and number in (21, 22, 23):  # met when the chunks are read
            assert damage(opened), f"{label}: went unseen"
            continue
        assert isinstance(error, REFUSED), f"{label}: {error!r}"
        assert re.search(names, str(error)), f"{label}: {error}"
        assert str(path) in str(error)
    assert bystander.state() == before


# attacks 41, 42
@pytest.mark.skipif(UNDER_ADDRESS_SANITIZER, reason="address space cannot be limited")
def test_no_claim_of_any_file_makes_a_reader_allocate_for_it(specimens, tmp_path):
    """Every forgery, and sparse files as large as they claim, within 48 MiB of address space."""
    expected = 0
    for kind in KINDS:
        raw = specimens.path(kind).read_bytes()
        for number in numbers_for(kind):
            for i, (_, content, _) in enumerate(forged(number, kind, raw)):
                if content != raw:
                    at = tmp_path / "files" / f"{kind}-{number}-{i}"
                    at.parent.mkdir(exist_ok=True)
                    at.write_bytes(content)
                    expected += 1
        for label, content, size, _ in claims_of_terabytes(raw):
            at = tmp_path / "files" / f"{kind}-41-{label}"
            at.write_bytes(content)
            os.truncate(at, size)
            expected += 1
    script = Path(__file__).with_name("open_under_limit.py")
    ran = subprocess.run(
        [sys.executable, script, tmp_path / "files", specimens.folder / "packs", "48"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    outcomes = [line.split(maxsplit=1) for line in ran.stdout.splitlines()]
    assert len(outcomes) == expected
    bad = [
        o
        for o in outcomes
        if o[0]
        not in ("CorruptSnapshotError", "UnsupportedVersionError", "StorageError", "damaged")
    ]
    assert not bad


def swapped(files, types):
    """The single file with sections of the other one; checksums made right."""
    parts = take_apart(files.single.read_bytes())
    other = take_apart(files.other.read_bytes())
    for kind in types:
        parts[kind].data = other[kind].data
    return put_together(parts)


# attacks 43, 44
@pytest.mark.parametrize(("kind", "layer"), [(PAYLOAD, 0), (SUMMARIES, -1)])
def test_payload_or_summaries_of_another_file_are_damage_in_every_chunk(files, kind, layer):
    files.single.write_bytes(swapped(files, [kind]))
    found = damage(files.single)
    layers = range(LAYERS) if layer == 0 else [-1]
    chunks = LENGTH // C + (1 if layer == 0 else 0)
    assert found == {(c, n) for c in range(chunks) for n in layers}


# attacks 45, 47
@pytest.mark.parametrize("kind", [TOKENS, CHUNKS])
def test_tokens_or_chunk_table_of_another_file_do_not_give_the_chain(files, bystander, kind):
    files.single.write_bytes(swapped(files, [kind]))
    before = bystander.state()
    with pytest.raises(FingerprintMismatchError, match="chain hash"):
        bystander.pager.restore(bystander.pager.open_snapshot(files.single))
    assert bystander.state() == before


# attack 46
def test_a_fingerprint_put_in_from_elsewhere_does_not_give_the_chain(files, bystander):
    """The file now claims to be this pager's, but its chunks were made under another namespace."""
    raw = files.single.read_bytes()
    parts = take_apart(raw)
    mine = parts[FINGERPRINT].data
    parts[FINGERPRINT].data = mine.replace(b"specimen", b"stranger")
    files.single.write_bytes(put_together(parts))
    before = bystander.state()
    with pytest.raises(FingerprintMismatchError, match="model"):
        bystander.pager.restore(bystander.pager.open_snapshot(files.single))
    with pytest.raises(FingerprintMismatchError, match="chain hash"):
        bystander.pager.restore(
            bystander.pager.open_snapshot(files.single), provenance="approximate"
        )
    assert bystander.state() == before


# attack 48
def test_two_chunks_that_changed_places_with_their_records_do_not_give_the_chain(files, bystander):
    parts = take_apart(files.single.read_bytes())
    geometry = parts.geometry
    for kind, size in (
        (PAYLOAD, geometry.chunk_bytes),
        (SUMMARIES, geometry.summary_bytes),
        (CHUNKS, geometry.record_bytes),
    ):
        data = parts[kind].data
        parts[kind].data = data[size : 2 * size] + data[:size] + data[2 * size :]
    files.single.write_bytes(put_together(parts))
    assert not damage(files.single)
    before = bystander.state()
    with pytest.raises(FingerprintMismatchError, match="chain hash"):
        bystander.pager.restore(bystander.pager.open_snapshot(files.single))
    assert bystander.state() == before


# attacks 49, 52
@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
    ids=["missing", "folder", "fifo", "loop", "device"],
)
def test_a_pack_that_is_no_file_is_refused_without_waiting(files, bystander, replace, words):
    files.pack().unlink()
    replace(files.pack())
    before = bystander.state()
    with pytest.raises(StorageError, match=words) as refused:
        bystander.pager.open_snapshot(files.manifest)
    assert files.pack().name in str(refused.value)
    assert bystander.state() == before


# attack 50
def test_a_pack_replaced_by_another_sound_pack_gives_no_bytes_of_it(files, specimens, bystander):
    before = bystander.state()
    sound = _core.SnapshotReader.open(str(specimens.manifest))
    expected = [bytes(sound.read_chunk(c)) for c in range(sound.chunks)]
    pager = make_pager()
    sequence = fill(pager.sequence(), LENGTH, seed=5)
    stranger = pager.core.freeze(sequence.uid)
    for which in ([0, 2], [0], [0, 1, 2]):
        write_single(files.pack(), stranger, pager.fingerprint_json, '{"pack":true}', which)
        check_gives_only(files.manifest, expected)
    # The same chunks in another order, and a pack of this store under another's name.
    content = _core.SnapshotReader.open(str(specimens.single))
    for which in ([0, 1], [1, 2]):
        write_single(files.pack(), content, pager.fingerprint_json, '{"pack":true}', which)
        check_gives_only(files.manifest, expected)
    shutil.copy(specimens.pack(1), files.pack(0))
    check_gives_only(files.manifest, expected)
    del stranger
    pager.close()
    assert bystander.state() == before


def check_gives_only(path, expected):
    """Refused at open, or every chunk is the saved one or an error."""
    if refusal(path) is not None:
        return
    reader = _core.SnapshotReader.open(str(path))
    damaged = {chunk for chunk, _, _ in reader.verify(1)}
    assert damaged
    for c, saved in enumerate(expected):
        if c in damaged:
            with pytest.raises(CorruptSnapshotError):
                reader.read_chunk(c)
        else:
            assert bytes(reader.read_chunk(c)) == saved


# attack 51
def test_a_manifest_in_the_place_of_a_pack_is_refused_even_its_own(files, bystander):
    before = bystander.state()
    for content in (files.manifest.read_bytes(), None):
        files.pack().unlink()
        if content is None:
            os.link(files.manifest, files.pack())
        else:
            files.pack().write_bytes(content)
        error = refusal(files.manifest)
        assert isinstance(error, CorruptSnapshotError)
        assert "manifest" in str(error) or "packs" in str(error)
    assert bystander.state() == before


# attack 53
def test_a_pack_cut_off_emptied_or_extended_is_refused_at_open(files):
    raw = files.pack().read_bytes()
    for content in (b"", raw[:FRONT], raw[: len(raw) // 2], raw[:-1], raw + b"\0"):
        files.pack().write_bytes(content)
        error = refusal(files.manifest)
        assert isinstance(error, CorruptSnapshotError)
        assert files.pack().name in str(error)


# attacks 54, 55, 56, 57, 58, 59
@pytest.mark.parametrize("section", JSON_SECTIONS)
@pytest.mark.parametrize(
    ("number", "text"),
    [
        pytest.param(n, t, id=f"{n} {label}")
        for n, all_ in JSON_ATTACKS.items()
        for label, t in all_
    ],
)
def test_json_that_is_none_or_ambiguous_is_refused(files, bystander, section, number, text):
    raw = with_json(files.single.read_bytes(), JSON_SECTIONS[section], text)
    files.single.write_bytes(raw)
    before = bystander.state()
    with pytest.raises(CorruptSnapshotError, match=section):
        bystander.pager.open_snapshot(files.single)
    assert bystander.state() == before


# attack 60
def test_the_id_of_a_pack_is_never_more_than_a_name_in_the_packs_folder(files):
    """Sixteen bytes become 32 hex digits, whatever they spell."""
    for spelled in (b"../../../../etc/", b"/etc/passwd\0\0\0\0\0", bytes(16), b"\xff" * 16):
        parts = take_apart(files.manifest.read_bytes())
        data = parts[PACKS].data
        parts[PACKS].data = data[:8] + spelled + data[24:]
        files.manifest.write_bytes(put_together(parts))
        low, high = struct.unpack("<QQ", spelled)
        name = files.folder / "packs" / f"{high:016x}{low:016x}.kvsnap"
        with pytest.raises(StorageError, match="No such file") as refused:
            open_snapshot(files.manifest)
        assert name.name in str(refused.value)
        shutil.copy(files.pack(), name)
        assert refusal(files.manifest) is None
        name.unlink()


# attack 61
@pytest.mark.parametrize("field", ["k_dim", "v_dim", "kv_heads", "layers", "summary_page_bytes"])
def test_a_pack_of_another_layout_is_refused(files, field):
    parts = take_apart(files.pack().read_bytes())
    value = get(parts[LAYOUT].data, LAYOUT_FIELDS, field)
    parts.set(LAYOUT, LAYOUT_FIELDS, field, 2 * value)
    n, geometry = 2, parts.geometry
    parts[PAYLOAD].data = bytes(n * geometry.chunk_bytes)
    parts[SUMMARIES].data = bytes(n * geometry.summary_bytes)
    records = parts[CHUNKS].data
    stride = len(records) // n
    parts[CHUNKS].data = b"".join(
        records[i * stride : (i + 1) * stride].ljust(geometry.record_bytes, b"\0") for i in range(n)
    )
    files.pack().write_bytes(put_together(parts))
    error = refusal(files.manifest)
    assert isinstance(error, CorruptSnapshotError)
    assert "layout" in str(error) or "summar" in str(error)


# attack 62
def test_a_place_that_points_at_the_tail_of_its_pack_is_refused(files, specimens):
    """The pack holds a tail behind its sealed chunks; the manifest counts it as one of them."""
    content = _core.SnapshotReader.open(str(specimens.single))
    write_single(files.pack(0), content, content.fingerprint, '{"pack":true}', [0, 3])
    error = refusal(files.manifest)
    assert isinstance(error, CorruptSnapshotError)


# attack 63
@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_optional_section_is_carried(files, kind):
    parts = take_apart(files.path(kind).read_bytes())
    parts.sections.append(Section(500, b"from the future", flags=0))
    files.path(kind).write_bytes(put_together(parts))
    assert refusal(files.path(kind)) is None
    assert not damage(files.path(kind))


# attack 65
def test_a_path_with_a_nul_is_refused_and_touches_no_other_file(files, bystander):
    path = str(files.single)
    kept = files.single.read_bytes()
    listed = listing(files.folder)
    for call in (
        lambda: _core.SnapshotReader.open(path + "\0x"),
        lambda: _core.SnapshotReader.open(str(files.manifest), str(files.folder) + "/packs\0x"),
        lambda: _core.SnapshotWriter(path + "\0x", _core.SnapshotReader.open(path).layout),
        lambda: bystander.sequence.save(path + "\0x"),
    ):
        with pytest.raises((InvalidArgumentError, ValueError)):
            call()
    assert files.single.read_bytes() == kept
    assert listing(files.folder) == listed


# attack 66
@pytest.mark.parametrize(
    "name",
    [
        "a\nb.kvsnap",
        "a\x1b[31mb.kvsnap",
        " .kvsnap",
        "-rf",
        "é\u202egpj.kvsnap",
        "%s%n.kvsnap",
        "x" * 255,
    ],
)
def test_an_odd_name_is_a_name_like_any_other(bystander, tmp_path, name):
    bystander.sequence.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    restored = bystander.pager.restore(bystander.pager.open_snapshot(tmp_path / name))
    assert restored.tokens.tolist() == bystander.sequence.tokens.tolist()
    restored.close()


# attack 67
def test_a_fifo_socket_device_or_folder_in_the_place_of_a_file_is_refused(
    tmp_path, bystander, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")  # a path of its own may be no longer than 107 bytes
        before = bystander.state()
        for name in ("fifo", "folder", "loop", "null", "socket"):
            with pytest.raises(StorageError, match=name):
                bystander.pager.open_snapshot(tmp_path / name)
            with pytest.raises(StorageError, match=name):
                bystander.sequence.save(tmp_path / name)
        assert bystander.state() == before
    assert len(list(tmp_path.iterdir())) == 5


# attack 73
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_changes_nothing_in_a_pager_that_restores_it_many_times(
    files, bystander, kind
):
    """Nothing leaks: descriptors, records, blocks."""
    path = files.path(kind)
    raw = path.read_bytes()
    spans = regions(raw)
    dice = random.Random(kind)
    path.write_bytes(raw)
    opened = files.manifest if kind == "pack" else path
    bits, descriptors = bystander.bits(), open_descriptors()
    for _ in range(60):
        name, start, stop = dice.choice(spans)
        path.write_bytes(flipped(raw, dice.randrange(start, stop)))
        try:
            session = bystander.pager.restore(bystander.pager.open_snapshot(opened))
        except (CorruptSnapshotError, UnsupportedVersionError, FingerprintMismatchError):
            continue
        for layer in range(LAYERS):
            with contextlib.suppress(CorruptSnapshotError):
                session.read_kv(layer, 0, session.length)
                continue
            assert name.startswith("payload")
        session.close()
        bystander.pager.evict_all()
    assert bystander.bits() == bits
    assert open_descriptors() == descriptors
    bystander.pager.check_invariants()


def test_the_table_of_forgeries_covers_its_numbers():
    assert sorted(FORGERIES) == list(range(15, 41))
    assert sorted(JSON_ATTACKS) == list(range(54, 60))


def test_taking_a_file_apart_and_putting_it_together_changes_nothing(specimens):
    for kind in KINDS:
        raw = specimens.path(kind).read_bytes()
        assert put_together(take_apart(raw)) == raw
        assert HEADER + ENTRY * len(take_apart(raw).sections) < FRONT
        assert ENTRY_FIELDS
        assert PACK_IDS

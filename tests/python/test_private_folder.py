"""A folder of the user's own is opened only if nobody else can have written what is read."""

from __future__ import annotations

import os

import pytest

from kvpager._support.private_folder import NotPrivateError, private_folder

OTHER = 65534  # user nobody


@pytest.fixture
def path(tmp_path):
    with private_folder(tmp_path / "own", make=True) as folder:
        folder.write("entry", b"mine")
    return tmp_path / "own"


def read(path, **options):
    with private_folder(path, make=False) as folder:
        return folder.read("entry", **options)


def test_what_was_written_is_read(path):
    assert read(path) == b"mine"
    assert [entry.name for entry in path.iterdir()] == ["entry"]


def test_folders_and_files_are_made_for_their_owner_alone(tmp_path):
    path = tmp_path / "above" / "own"
    mask = os.umask(0)
    try:
        with private_folder(path, make=True) as folder, folder.folder("in", make=True) as inner:
            inner.write("entry", b"mine")
    finally:
        os.umask(mask)
    assert [one.stat().st_mode & 0o777 for one in (path.parent, path, path / "in")] == [0o700] * 3
    assert (path / "in" / "entry").stat().st_mode & 0o777 == 0o600


def test_what_is_missing_is_not_made_by_reading(tmp_path):
    with pytest.raises(FileNotFoundError), private_folder(tmp_path / "no", make=False):
        pass
    assert not (tmp_path / "no").exists()
    with private_folder(tmp_path / "no", make=True) as folder:
        assert folder.read("entry") is None


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o770, 0o1777])
def test_a_folder_that_others_can_write_in_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(NotPrivateError, match=rf"{path} can be written by others .mode {mode:04o}"):
        read(path)


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_file_that_others_can_write_is_refused(path, mode):
    (path / "entry").chmod(mode)
    with pytest.raises(NotPrivateError, match="entry can be written by others"):
        read(path)


def test_a_secret_that_others_can_read_is_refused(path):
    (path / "entry").chmod(0o640)
    assert read(path) == b"mine"
    with pytest.raises(NotPrivateError, match="entry can be read by others"):
        read(path, secret=True)


@pytest.mark.parametrize("of", ["folder", "file"])
def test_what_belongs_to_another_user_is_refused(path, monkeypatch, of):
    changed = path if of == "folder" else path / "entry"
    if os.geteuid() == 0:
        os.chown(changed, OTHER, -1)
    elif of == "folder":
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    else:
        pytest.skip("only root gives files away")
    with pytest.raises(NotPrivateError, match=f"{changed} belongs to user"):
        read(path)


def test_a_link_in_the_place_of_the_folder_or_a_file_is_refused(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    for name in (link, f"{link}/", f"{link}/."):
        with pytest.raises(NotPrivateError, match="link is a symbolic link"):
            read(type(path)(name))
    (path / "entry").replace(path / "other")
    (path / "entry").symlink_to("other")
    with pytest.raises(NotPrivateError, match="entry is a symbolic link"):
        read(path)


def test_a_link_in_the_place_of_an_inner_folder_is_refused(path, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (path / "in").symlink_to(tmp_path / "elsewhere")
    for make in (False, True):
        with private_folder(path, make=make) as folder:  # noqa: SIM117
            with pytest.raises(NotPrivateError), folder.folder("in", make=make):
                pass


def test_a_link_above_the_folder_is_followed(path, tmp_path):
    (tmp_path / "above").symlink_to(tmp_path)
    assert read(tmp_path / "above" / "own") == b"mine"


def test_a_file_with_another_name_is_refused(path):
    os.link(path / "entry", path / "other")
    with pytest.raises(NotPrivateError, match="entry is a hard link"):
        read(path)


def test_a_pipe_is_refused_and_not_waited_for(path):
    (path / "entry").unlink()
    os.mkfifo(path / "entry")
    with pytest.raises(NotPrivateError, match="entry is no plain file"):
        read(path)


def test_a_folder_that_everybody_can_exchange_is_refused(path, tmp_path):
    mode = tmp_path.stat().st_mode
    tmp_path.chmod(0o1777)  # as /tmp is
    assert read(path) == b"mine"
    tmp_path.chmod(0o777)
    try:
        with pytest.raises(NotPrivateError, match=f"{tmp_path}, above .* by everybody"):
            read(path)
    finally:
        tmp_path.chmod(mode)


def test_what_is_exchanged_after_it_was_opened_is_not_read(path, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "entry").write_bytes(b"theirs")
    with private_folder(path, make=False) as folder:
        path.replace(tmp_path / "away")
        (tmp_path / "evil").replace(path)
        assert folder.read("entry") == b"mine"


def test_a_link_is_not_written_through(path, tmp_path):
    (tmp_path / "target").write_bytes(b"kept")
    (path / "entry").unlink()
    (path / "entry").symlink_to(tmp_path / "target")
    with private_folder(path, make=True) as folder:
        folder.write("entry", b"new")
    assert (tmp_path / "target").read_bytes() == b"kept"
    assert read(path) == b"new"

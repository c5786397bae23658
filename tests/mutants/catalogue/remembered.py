"""What is remembered between starts: whose files are taken, and of which code."""

from mutants.mutant import Mutant

ENTRIES = "python/test_remembered.py::"
FOLDER = "python/test_private_folder.py::"
OPENED = "python/kvpager/private_folder.py"

REMEMBERED = (
    Mutant(
        name="remembered-values-have-no-code",
        breaks="a remembered value with any other bit is nothing",
        file="python/kvpager/remembered.py",
        old=" if same and hmac.compare_digest(code, _code(found, secret)) else None",
        new=" if same else None",
        killers=(
            ENTRIES + "test_a_file_with_any_other_bit_is_nothing_unless_it_says_the_same",
            ENTRIES + "test_a_file_that_was_written_without_the_secret_is_nothing",
            ENTRIES + "test_entries_of_another_folder_are_nothing",
        ),
    ),
    Mutant(
        name="remembered-values-of-any-kind",
        breaks="what is remembered under one kind is not taken for another",
        file="python/kvpager/remembered.py",
        old='found["kind"] == kind and ',
        new="",
        killers=(ENTRIES + "test_an_entry_of_one_kind_is_none_of_another",),
    ),
    Mutant(
        name="a-secret-of-any-length",
        breaks="a secret that was lost is made again",
        file="python/kvpager/remembered.py",
        old=" and len(found) == _SECRET_BYTES",
        new="",
        killers=(ENTRIES + "test_without_its_secret_all_is_found_out_anew_and_remembered_again",),
    ),
    Mutant(
        name="a-folder-of-another-user-is-trusted",
        breaks="what belongs to another user is refused",
        file=OPENED,
        old="    if found.st_uid != own:\n",
        new="    if False:\n",
        killers=(FOLDER + "test_what_belongs_to_another_user_is_refused[folder]",),
    ),
    Mutant(
        name="a-folder-that-others-write-in-is-trusted",
        breaks="a folder that others can write in is refused",
        file=OPENED,
        old="        _check(path, os.fstat(descriptor), _OTHERS_WRITE)\n",
        new="        _check(path, os.fstat(descriptor), 0)\n",
        killers=(
            FOLDER + "test_a_folder_that_others_can_write_in_is_refused",
            ENTRIES + "test_what_others_may_have_written_is_nothing_and_is_said_once",
        ),
    ),
    Mutant(
        name="a-secret-that-others-read",
        breaks="a secret that others can read is refused",
        file=OPENED,
        old="_OTHERS if secret else _OTHERS_WRITE",
        new="_OTHERS_WRITE",
        killers=(FOLDER + "test_a_secret_that_others_can_read_is_refused",),
    ),
    Mutant(
        name="hard-links-are-followed",
        breaks="a file with another name is refused",
        file=OPENED,
        old="            if found.st_nlink > 1:\n",
        new="            if found.st_nlink > 2:\n",
        killers=(FOLDER + "test_a_file_with_another_name_is_refused",),
    ),
    Mutant(
        name="what-everybody-can-exchange-is-trusted",
        breaks="a folder in one that everybody can write in is refused",
        file=OPENED,
        old="        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:\n",
        new="        if False:\n",
        killers=(FOLDER + "test_a_folder_that_everybody_can_exchange_is_refused",),
    ),
    Mutant(
        name="files-are-opened-by-their-paths",
        breaks="what is exchanged after it was opened is not read",
        file=OPENED,
        old="            descriptor = os.open(name, _FILE_FLAGS, dir_fd=self._descriptor)\n",
        new="            descriptor = os.open(path, _FILE_FLAGS)\n",
        killers=(FOLDER + "test_what_is_exchanged_after_it_was_opened_is_not_read",),
    ),
)

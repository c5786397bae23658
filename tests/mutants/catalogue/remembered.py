"""What is remembered between starts: whose files are taken, and of which code."""

from mutants.mutant import Mutant

ENTRIES = "python/test_remembered.py::"
FOLDER = "python/test_private_folder.py::"
OPENED = "python/kvpager/_support/private_folder.py"
CODE = "model/test_code_that_is_remembered.py::"
EXCHANGED = CODE + "test_a_program_that_exchanges_code_has_its_models_proven_at_every_start"
SEEN = "python/kvpager/_model/facts/code_seen.py"
FILES = "python/kvpager/_model/facts/released_files.py"
PROVEN = "python/kvpager/_model/facts/proven_before.py"

REMEMBERED = (
    Mutant(
        name="remembered-values-have-no-code",
        breaks="a remembered value with any other bit is nothing",
        file="python/kvpager/_support/remembered.py",
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
        file="python/kvpager/_support/remembered.py",
        old='found["kind"] == kind and ',
        new="",
        killers=(ENTRIES + "test_an_entry_of_one_kind_is_none_of_another",),
    ),
    Mutant(
        name="a-secret-of-any-length",
        breaks="a secret that was lost is made again",
        file="python/kvpager/_support/remembered.py",
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
    Mutant(
        name="classes-of-any-file-are-remembered",
        breaks="a model with a user's class is proven at every start",
        file=SEEN,
        old=" or is_released(file)\n",
        new=" or True\n",
        killers=(
            CODE + "test_a_model_with_a_users_class_is_proven_at_every_start",
            CODE + "test_a_function_that_becomes_one_of_other_rows_is_refused_at_the_next_start",
            EXCHANGED,
        ),
    ),
    Mutant(
        name="what-ran-is-not-asked-about",
        breaks="hooks that only look, of unknown code, are proven at every start",
        file=SEEN,
        old="            if not known.holds(code, names):\n",
        new="            if False:\n",
        killers=(
            CODE + "test_a_model_with_other_code_is_proven_at_every_start[with_hook_that_looks]",
        ),
    ),
    Mutant(
        name="functions-that-did-not-run-are-not-asked-about",
        breaks="a module with a function of somebody else is proven at every start",
        file=PROVEN,
        old="                if not known.may_import(function):\n",
        new="                if False:\n",
        killers=(EXCHANGED + "[function_that_is_not_run]",),
    ),
    Mutant(
        name="names-of-somebody-else",
        breaks="a function of released code with names of somebody else is not known",
        file=SEEN,
        old="            return False  # its code, with names of somebody else\n",
        new="            pass\n",
        killers=(EXCHANGED + "[exchanged_names]",),
    ),
    Mutant(
        name="files-edited-by-hand-are-released",
        breaks="a file of a package that was edited by hand is not of a release",
        file=FILES,
        old="        return recorded == base64",
        new="        return True or recorded == base64",
        killers=(
            EXCHANGED + "[edited_file]",
            CODE + "test_a_file_is_released_while_it_has_the_bytes_that_were_installed",
        ),
    ),
    Mutant(
        name="a-files-time-is-its-content",
        breaks="a file that was edited and given its old time back is noticed",
        file=FILES,
        old="found.st_mtime_ns, found.st_ctime_ns, found.st_ino]",
        new="found.st_mtime_ns]",
        killers=(
            CODE + "test_a_file_is_released_while_it_has_the_bytes_that_were_installed",
            CODE + "test_a_library_that_was_exchanged_is_noticed_though_it_says_the_same",
        ),
    ),
    Mutant(
        name="nightlies-are-releases",
        breaks="a version that is no release is not remembered",
        file=FILES,
        old="        if not _RELEASE.fullmatch(found.version):\n",
        new="        if False:\n",
        killers=(CODE + "test_a_version_that_is_no_release_is_not_remembered",),
    ),
    Mutant(
        name="kernels-of-anybody",
        breaks="a kernel that torch's was exchanged for is noticed",
        file=SEEN,
        old="            if not root or not place.startswith(root):\n",
        new="            if False:\n",
        killers=(CODE + "test_a_kernel_that_torchs_was_exchanged_for_is_noticed",),
    ),
    Mutant(
        name="a-finding-that-disagrees-is-kept",
        breaks="a remembered proof of a model that computes otherwise is thrown away",
        file=PROVEN,
        old='                if found.behaviour == remembered["behaviour"]:\n',
        new="                if True:\n",
        killers=("model/test_proven_before.py::test_a_finding_that_disagrees_is_thrown_away",),
    ),
)

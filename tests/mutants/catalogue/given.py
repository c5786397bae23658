"""Positions whose keys and values are given, and rows of a model among them."""

from mutants.mutant import Mutant

GIVEN = "cpp/pager/given_rows_test.cc::"
PYTHON = "python/test_pager_given.py::"
AMONG = (
    GIVEN + "given keys and values are what rows would have written, and rows among them attend as "
    "in ordinary forwards"
)
EACH = GIVEN + "sequences of one forward are given, compute and read, each for itself"
ANYWHERE = (
    PYTHON + "test_rows_among_given_positions_attend_as_in_ordinary_forwards_wherever_chunks_are"
)
SHIM = PYTHON + "test_a_device_gives_the_processors_bits[shim]"
REFUSED = GIVEN + "calls that do not fit a forward with given positions are refused, and it goes on"

GIVEN_ROWS = (
    Mutant(
        name="what-is-given-lands-in-one-layer",
        breaks="what is given is kept at its own layer",
        file="csrc/pager/host_attend.cc",
        old="row.slice += layout_.slice_offset(static_cast<int>(layer));",
        new="row.slice += layout_.slice_offset(static_cast<int>(layer) / 2);",
        killers=(AMONG, ANYWHERE),
    ),
    Mutant(
        name="a-device-gives-all-to-the-first-token",
        breaks="what is given on a device is kept at its own position",
        file="csrc/pager/device_forward.cc",
        old="given.position % layout_.chunk_tokens);",
        new="given.position % 2);",
        killers=(AMONG, SHIM),
    ),
    Mutant(
        name="given-ids-come-first",
        breaks="a position's token is the one it was named with, given or computed",
        file="csrc/pager/begin.cc",
        old="next->tokens.insert(next->tokens.end(), with.given",
        new="next->tokens.insert(next->tokens.begin(), with.given",
        killers=(AMONG, EACH, ANYWHERE),
    ),
    Mutant(
        name="dense-is-for-pagers-that-are",
        breaks="rows of a dense forward attend to all before them, whatever the selection",
        file="csrc/pager/begin.cc",
        old="next->dense = with.dense || config_.dense();",
        new="next->dense = config_.dense();",
        killers=(
            PYTHON + "test_a_forward_that_is_to_be_dense_sees_all_though_the_pager_selects[cpu]",
            PYTHON + "test_a_forward_that_is_to_be_dense_sees_all_though_the_pager_selects[shim]",
        ),
    ),
    Mutant(
        name="rows-attend-before-what-they-see-is-there",
        breaks="no row attends to a given position that nobody has written",
        file="csrc/pager/running_forward.cc",
        old="  if (forward_->given_count > 0 && !forward_->given_written) {\n"
        '    throw InvalidArgumentError(str("attend',
        new='  if (forward_->given_count < 0) {\n    throw InvalidArgumentError(str("attend',
        killers=(REFUSED,),
    ),
    Mutant(
        name="what-was-to-be-given-is-forgotten",
        breaks="14: what a commit makes part of a sequence was written",
        file="csrc/pager/commit.cc",
        old="if (forward_->given_count > 0 && !forward_->given_written) {",
        new="if (forward_->given_count < 0) {",
        killers=(REFUSED, PYTHON + "test_what_does_not_fit_is_refused_by_name"),
    ),
    Mutant(
        name="what-is-given-is-finite-by-assumption",
        breaks="14: keys or values that are not finite abort the forward, also those given",
        file="csrc/pager/host_attend.cc",
        old="    if (bad[static_cast<size_t>(layer)] >= 0) {\n",
        new="    if (bad[static_cast<size_t>(layer)] >= INT32_MAX) {\n",
        killers=(
            GIVEN + "a number that is not finite is refused with its layer and position, and "
            "nothing stays",
            PYTHON + "test_a_forward_that_does_not_come_to_its_end_leaves_the_sequence_as_it_was",
        ),
    ),
    Mutant(
        name="what-a-device-is-given-is-finite-by-assumption",
        breaks="14: the same on a device, where a commit finds it out",
        file="csrc/pager/device_forward.cc",
        old="bad = status[kGivenStatus]; bad != gpu::kNoFailure) {",
        new="bad = status[kGivenStatus]; bad < gpu::kNoFailure / 2 && bad > uint64_t{1} << 40) {",
        killers=(
            GIVEN + "a number that is not finite is refused with its layer and position, and "
            "nothing stays",
        ),
    ),
    Mutant(
        name="given-positions-alone-are-never-exact",
        breaks="what is given is worth what the caller says where no row could change it",
        file="csrc/pager/commit.cc",
        old="(rows == options_.rows || rows == 0 ||",
        new="(rows == options_.rows ||",
        killers=(
            GIVEN + "what is given is worth what the caller says where no row of the model could "
            "change it",
            PYTHON + "test_an_append_forwards_no_row_of_a_model_and_is_exact_where_it_says_so",
        ),
    ),
    Mutant(
        name="a-row-sees-what-is-given-next",
        breaks="a row sees nothing after its own position, however it came there",
        file="csrc/pager/host_attend.cc",
        old="row[i] = {forward_->rows[i].position, ",
        new="row[i] = {forward_->rows[i].position + 1, ",
        killers=(
            GIVEN + "what is given after a row is nothing to the row, nor to a chunk before it",
            PYTHON + "test_what_comes_after_a_row_is_nothing_to_it_nor_to_the_chunks_before",
        ),
    ),
    Mutant(
        name="a-sink-of-nan-is-taken",
        breaks="a sink that would hide every key is refused",
        file="csrc/pager/running_forward.cc",
        old="  if (attend_options.sinks != nullptr && !attend_options.sinks_on_device) {\n",
        new="  if (false) {\n",
        killers=(
            "python/test_pager_arguments.py::test_a_sink_that_would_hide_every_key_is_refused",
        ),
    ),
)

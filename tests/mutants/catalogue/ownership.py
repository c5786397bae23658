"""Who owns what a pager gave, in which process, and numbers that are not finite."""

from mutants.mutant import Mutant

INTERRUPTS = "python/test_pager_identity.py::"
IDENTITY = "python/test_pager_identity.py::"
FINITE = "python/test_non_finite.py::"
FORK = "python/test_fork.py::test_a_forked_child_is_refused_ends_and_changes_nothing"
BINDINGS = "python/test_binding_safety.py::"
EVERYWHERE = FINITE + "test_no_tier_takes_a_number_that_is_not_finite_at_any_offset[two]"

OWNERSHIP = (
    Mutant(
        name="a-write-goes-to-whichever-forward-runs",
        breaks="what is for a forward that has ended does not reach the one that runs",
        file="csrc/bindings/pager.cc",
        old="            write(*forward.pager(), layer, k, v, stream, forward.number());",
        new="            write(*forward.pager(), layer, k, v, stream, 0);",
        killers=(
            IDENTITY
            + "test_what_is_for_a_forward_that_was_replaced_meanwhile_does_not_reach_the_next_one"
            "[write]",
        ),
    ),
    Mutant(
        name="attention-goes-to-whichever-forward-runs",
        breaks="what is for a forward that has ended does not reach the one that runs",
        file="csrc/bindings/handles.cc",
        old="  pager()->attend(layer, q, k, v, out, options, number_);",
        new="  pager()->attend(layer, q, k, v, out, options);",
        killers=(
            IDENTITY
            + "test_what_is_for_a_forward_that_was_replaced_meanwhile_does_not_reach_the_next_one"
            "[attend]",
        ),
    ),
    Mutant(
        name="a-forwards-number-is-not-asked-under-the-lock",
        breaks="what is for a forward that has ended does not reach the one that runs",
        file="csrc/pager/running_forward.cc",
        old="  throw InvalidArgumentError(kForwardEnded);\n",
        new="",
        killers=(
            "cpp/pager/forward_test.cc::"
            "what is for a forward that has ended does not reach the one that runs",
        ),
    ),
    Mutant(
        name="a-list-that-is-given-is-borrowed",
        breaks="tensors that are given live until the call has returned",
        file="csrc/bindings/pager.cc",
        old="  const py::tuple k_owned(k);",
        new="  const py::list k_owned(k);",
        killers=(BINDINGS + "test_lists_that_are_emptied_during_a_give_lose_nothing",),
    ),
    Mutant(
        name="a-drop-keeps-the-interpreter-waiting",
        breaks="other threads run while a save that is dropped waits for the pager's lock",
        file="csrc/bindings/shared.h",
        old="    const pybind11::gil_scoped_release release;\n    object.reset();",
        new="    object.reset();",
        killers=(
            BINDINGS + "test_other_threads_go_on_while_a_drop_waits_for_an_attention_call[save]",
        ),
    ),
    Mutant(
        name="a-restore-takes-none",
        breaks="a wrong argument is a typed error",
        file="csrc/bindings/pager.cc",
        old='py::arg("reader").none(false)',
        new='py::arg("reader")',
        killers=(BINDINGS + "test_every_wrong_argument_of_every_binding_is_a_typed_error",),
    ),
    Mutant(
        name="a-dropped-forward-goes-on",
        breaks="19: a forward that nobody holds is aborted",
        file="csrc/bindings/handles.h",
        old="  ~ForwardHandle() { abort(); }",
        new="  ~ForwardHandle() {}",
        killers=(
            INTERRUPTS + "test_an_interrupt_at_any_return_leaves_nothing_behind[rows]",
            IDENTITY + "test_what_nobody_holds_goes_back",
        ),
    ),
    Mutant(
        name="a-dropped-pin-holds",
        breaks="19: a pin that nobody holds is released",
        file="csrc/bindings/handles.h",
        old="  ~PinHandle() { release(); }",
        new="  ~PinHandle() {}",
        killers=(IDENTITY + "test_what_nobody_holds_goes_back",),
    ),
    Mutant(
        name="a-sequence-of-a-running-forward-is-never-dropped",
        breaks="19: a sequence that is dropped while its forward runs goes with it",
        file="csrc/pager/sequences.cc",
        old="    found->second.dropped = true;\n",
        new="",
        killers=(IDENTITY + "test_a_sequence_that_is_dropped_while_its_forward_runs_goes_with_it",),
    ),
    Mutant(
        name="a-sequence-of-any-pager-will-do",
        breaks="19: a pager takes its own sequences alone",
        file="csrc/bindings/handles.cc",
        old="  if (pager().get() != &other) {",
        new="  if (pager() == nullptr) {",
        killers=(IDENTITY + "test_a_forward_with_a_sequence_of_another_pager_is_refused",),
    ),
    Mutant(
        name="queries-are-not-looked-at",
        breaks="14: a query that is not finite aborts the forward",
        file="csrc/pager/host_attend.cc",
        old="    if (bad >= 0) refuse_query(*forward_, layer, bad);",
        new="    static_cast<void>(bad);",
        killers=(EVERYWHERE,),
    ),
    Mutant(
        name="queries-of-padding-are-looked-at",
        breaks="14: what is in a padding row is nobody's affair",
        file="csrc/kernels/rows.cc",
        old="    if (part[row] >= 0 && !row_fits",
        new="    if (part[row] >= -1 && !row_fits",
        killers=(EVERYWHERE,),
    ),
    Mutant(
        name="select-takes-any-query",
        breaks="14: a query that is not finite selects nothing",
        file="csrc/pager/inspect.cc",
        old="find_non_finite(q, &kPart) >= 0) {",
        new="find_non_finite(q, &kPart) >= q.rows) {",
        killers=(EVERYWHERE,),
    ),
    Mutant(
        name="a-device-looks-at-no-queries",
        breaks="14: on a device too, a query that is not finite aborts the forward",
        file="csrc/cuda/write_rows.cu",
        old="    if (rows[row].part < 0 || row >= failed) continue;",
        new="    if (rows[row].part < 0 || row >= 0) continue;",
        killers=(FINITE + "test_no_device_takes_a_number_that_is_not_finite",),
    ),
    Mutant(
        name="a-forked-child-is-let-in",
        breaks="6: a forked child changes nothing of its parent's",
        file="csrc/pager/locked.h",
        old='  impl.process.require("pager");',
        new="  static_cast<void>(impl.process);",
        killers=(FORK + "[pager_in_child]",),
    ),
    Mutant(
        name="a-forked-child-removes-its-parents-file",
        breaks="6: a forked child removes no file that its parent writes",
        file="csrc/snapshot/output_file.cc",
        old="  if (!temporary_.empty() && !process_.forked())",
        new="  if (!temporary_.empty())",
        killers=(FORK + "[fork_while_writing]",),
    ),
    Mutant(
        name="a-forked-child-takes-a-lock-back",
        breaks="6: a forked child takes back no lock of its parent's",
        file="csrc/bindings/locks.cc",
        old="    if (file_ != nullptr && !process_.forked()) ::flock",
        new="    if (file_ != nullptr) ::flock",
        killers=(FORK + "[fork_while_writing]",),
    ),
)

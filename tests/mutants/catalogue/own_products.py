"""Linear layers in an order of operations of our own, remembered proofs, and recorded forwards."""

from mutants.mutant import Mutant

KERNEL = "cpp/compute/linear_test.cc::"
ORDER = KERNEL + "every element has the order of operations that is written down, in every tier"
ANY_ROWS = KERNEL + "a row has the same bits among any number of rows, at any place, in any tier"
BLOCKS = KERNEL + "so it is where rows, outputs and the depth take several blocks of the caches"
SEVERAL = (
    KERNEL + "several products at once have the bits of each alone, whose input each of them reads"
)
THREADS = KERNEL + "threads change no bit, and nothing is written between rows"
ODD_FIRST = KERNEL + "of a pair of bfloat16 the odd element is first, in every tier"
EXPONENTS = (
    KERNEL
    + "bfloat16 of every exponent has the same bits in every tier, denormals and infinities too"
)
LINEAR = "model/test_linear.py::"
PROVEN = "model/test_proven_before.py::"
KNOWN = "model/test_known_weights.py::"
RECORDED = "model/test_recordings.py::"
RECORDINGS = "python/kvpager/_runtime/execution/recordings.py"
PROGRAM = "cpp/compute/program_test.cc::"
PROGRAMS = "model/test_programs.py::"
EXPERTS = "model/test_expert_products.py::"
FUNCTIONAL = "python/kvpager/_model/seam/functions.py"
ROUTERS = "model/test_functions_of_modules.py::"
ARCHITECTURES = "model/test_architectures.py::test_a_sample_of_architectures_is_what_the_table_says"
SIGMOID = "model/test_sigmoid.py::"
BESIDE = "model/test_model_beside_engines.py::"

OWN_PRODUCTS = (
    Mutant(
        name="experts-are-read-again",
        breaks="experts that another thread rewrites are those that were checked",
        file="csrc/compute/linear_experts.cc",
        old="next[static_cast<size_t>(chosen[row])]++",
        new="next[static_cast<size_t>(params.chosen[row])]++",
        killers=(
            KERNEL
            + "experts that another thread rewrites are those that were checked, or are refused",
        ),
    ),
    Mutant(
        name="workspaces-never-shrink",
        breaks="what products keep between calls is bounded for all threads together",
        file="csrc/base/workspaces.h",
        old="    while (kept > kKeptBytes || kept_.size() > kMost) {",
        new="    while (kept_.size() > kMost) {",
        killers=(
            KERNEL + "a workspace is the smallest that is kept, and the largest ones stay",
            "python/test_scratch.py::"
            "test_what_products_keep_is_in_stats_and_bounded_for_all_threads_together",
        ),
    ),
    Mutant(
        name="workspaces-are-not-counted",
        breaks="what products keep between calls is in stats",
        file="csrc/pager/inspect.cc",
        old="  stats.workspace_bytes = workers->workspace_bytes();\n",
        new="",
        killers=(
            "python/test_scratch.py::"
            "test_what_products_keep_is_in_stats_and_bounded_for_all_threads_together",
        ),
    ),
    Mutant(
        name="a-program-trusts-what-it-is-given",
        breaks="a run is refused unless it is given what the program expects",
        file="csrc/compute/program.cc",
        old="    check_given(i, given[i], given_[i], alignments_[i]);\n",
        new="",
        killers=(
            PROGRAM
            + "a run is refused, and computes nothing, unless it is given what the program expects",
        ),
    ),
    Mutant(
        name="a-program-takes-any-shape-of-as-many-bytes",
        breaks="a program refuses a tensor of another dtype or shape",
        file="csrc/bindings/program.cc",
        old="        require_shaped(i, given[i], *shaped);\n",
        new="",
        killers=(
            PROGRAMS + "test_a_program_refuses_a_tensor_of_another_dtype_or_shape_of_as_many_bytes",
        ),
    ),
    Mutant(
        name="routers-are-torchs",
        breaks="a lone session of a mixture decodes with one row",
        file=FUNCTIONAL,
        old="            if func is F.linear:\n",
        new="            if func is None:\n",
        killers=(ROUTERS + "test_lone_sessions_of_a_mixture_decode_with_one_row",),
    ),
    Mutant(
        name="experts-with-a-sigmoid-are-transformers",
        breaks="an architecture is taken as the table says",
        file=FUNCTIONAL,
        old='    if not isinstance(own, FunctionType) or hasattr(own, "__wrapped__"):\n',
        new="    if not isinstance(own, FunctionType):\n",
        killers=(ARCHITECTURES + "[minimax_m3_vl_text]",),
    ),
    Mutant(
        name="few-numbers-take-torchs-other-sigmoid",
        breaks="a number's sigmoid has the same bits among any number of others",
        file="python/kvpager/_model/seam/sigmoid.py",
        old="(0, -len(elements) % TORCH_STEP)",
        new="(0, 0)",
        killers=(SIGMOID + "test_a_number_has_the_same_sigmoid_among_any_number_of_others",),
    ),
    Mutant(
        name="threads-share-a-sigmoid",
        breaks="a number's sigmoid has the same bits among any number of others",
        file="python/kvpager/_model/seam/sigmoid.py",
        old="torch.split(padded, TORCH_SHARE)",
        new="[padded]",
        killers=(SIGMOID + "test_threads_change_no_bit_of_it",),
    ),
    Mutant(
        name="sigmoids-of-modules-are-torchs",
        breaks="a lone session of a mixture decodes with one row",
        file=FUNCTIONAL,
        old="elif func in _SIGMOIDS and",
        new="elif func is None and",
        killers=(ROUTERS + "test_lone_sessions_of_a_mixture_decode_with_one_row",),
    ),
    Mutant(
        name="a-router-computes-here-for-everybody",
        breaks="outside an engine's forward a router is torch's",
        file=FUNCTIONAL,
        old="            functions.layers = None  # an interrupt may have left it on the stack\n",
        new="            pass\n",
        killers=(
            ROUTERS + "test_a_mode_that_an_interrupt_left_computes_nothing_and_counts_for_none",
        ),
    ),
    Mutant(
        name="copies-of-routers-are-tried-with-torchs-products",
        breaks="a lone session of a mixture decodes with one row",
        file=FUNCTIONAL,
        old="    vars(copy)[_COPY_OF] = id(module)\n",
        new="    pass\n",
        killers=(ROUTERS + "test_lone_sessions_of_a_mixture_decode_with_one_row",),
    ),
    Mutant(
        name="a-replay-is-run-within-a-mode",
        breaks="a mode of torch that only looks sees every forward",
        file=RECORDINGS,
        old="        if active_modes():\n            return True\n",
        new="",
        killers=("model/test_torch_modes.py::test_a_mode_that_only_looks_sees_every_forward",),
    ),
    Mutant(
        name="even-elements-first",
        breaks="bfloat16 has the order of VDPBF16PS in every tier: of a pair the odd element first",
        file="csrc/compute/linear_elements_isa.h",
        old="return i == 0 ? odd_floats(step) : even_floats(step);",
        new="return i == 1 ? odd_floats(step) : even_floats(step);",
        killers=(ODD_FIRST,),
    ),
    Mutant(
        name="denormals-count-in-bfloat16",
        breaks="denormal operands and results of bfloat16 products are zeros in every tier",
        file="csrc/compute/linear.cc",
        old="environment(panel.params.dtype == DType::kBFloat16);",
        new="environment(false);",
        killers=(EXPONENTS,),
    ),
    Mutant(
        name="sums-that-start-beside-zero",
        breaks="an element is the sum of its products, in the order written down, and its bias",
        file="csrc/compute/linear_isa.cc",
        old="for (int n = 0; n < kOutputs; ++n) sums[r][n] = splat(0.0f);",
        new="for (int n = 0; n < kOutputs; ++n) sums[r][n] = splat(1e-7f);",
        killers=(ORDER,),
    ),
    Mutant(
        name="few-rows-round-otherwise",
        breaks="a row has the same bits among any number of rows",
        file="csrc/compute/linear_elements_isa.h",
        old="    sums[0][n] = sum[0][0];\n",
        new="    sums[0][n] = fma(sum[0][0], splat(1.0000001f), splat(0.0f));\n",
        killers=(ANY_ROWS,),
    ),
    Mutant(
        name="a-single-row-leaves-out-the-end-of-its-depth",
        breaks="a row has the same bits among any number of rows",
        file="csrc/compute/linear_elements_isa.h",
        old="    add_rest<Type>(params, x, w, whole, sum);\n",
        new="",
        killers=(ORDER, ANY_ROWS),
    ),
    Mutant(
        name="sums-of-the-depths-first-block-are-lost",
        breaks="an element is the sum of all its products where the depth takes several blocks",
        file="csrc/compute/linear_copied_isa.h",
        old="sum[r][n] = first ? _mm256_setzero_ps()",
        new="sum[r][n] = true ? _mm256_setzero_ps()",
        killers=(BLOCKS,),
    ),
    Mutant(
        name="several-rows-are-multiplied-by-one-block-alone",
        breaks="an element is the sum of all its products where the depth takes several blocks",
        file="csrc/compute/linear_several_isa.h",
        old="add_half<rows.value>(x, own, whole, at == 0, to, ahead);",
        new="add_half<rows.value>(x, own, whole, true, to, ahead);",
        killers=(BLOCKS,),
    ),
    Mutant(
        name="several-rows-leave-the-depths-last-elements-out",
        breaks="an element is the sum of its products, in the order written down, and its bias",
        file="csrc/compute/linear_several_isa.h",
        old="static_cast<size_t>(params.depth - k - done) * sizeof(Element)",
        new="static_cast<size_t>(0) * (params.depth - k - done)",
        killers=(ORDER,),
    ),
    Mutant(
        name="a-small-tile-has-the-next-tiles-row",
        breaks="a row has the same bits among any number of rows, at any place",
        file="csrc/compute/linear_copied_isa.h",
        old="return first_row(tile, row_tiles(rows), rows);",
        new="return tile * kPackedRows;",
        killers=(ORDER,),
    ),
    Mutant(
        name="another-inputs-rows-are-multiplied",
        breaks="each of several products reads its own input",
        file="csrc/compute/linear.cc",
        old="last->x == one.x && ",
        new="",
        killers=(SEVERAL,),
    ),
    Mutant(
        name="rows-are-copied-from-the-depths-beginning-alone",
        breaks="an element is the sum of all its products where the depth takes several blocks",
        file="csrc/compute/linear_copied_isa.h",
        old="(from_vector + done) / Type::kVectors * Type::kStep, depth",
        new="from_vector / Type::kVectors * Type::kStep, depth",
        killers=(BLOCKS,),
    ),
    Mutant(
        name="rows-that-are-left-are-not-computed",
        breaks="every row is computed where rows take several blocks",
        file="csrc/compute/linear.cc",
        old="      multiply(part.data(), count, pool);  // the few that are left\n",
        new="",
        killers=(BLOCKS,),
    ),
    Mutant(
        name="panels-by-turns-leave-some-out",
        breaks="every output is computed, however panels are divided among threads",
        file="csrc/compute/linear.cc",
        old="std::min(thread, panels_ % threads_)",
        new="0",
        killers=(THREADS,),
    ),
    Mutant(
        name="every-models-layers-are-computed",
        breaks="within an engine's forward, other models' layers have torch's bits",
        file="python/kvpager/_model/seam/linear.py",
        old="            and id(self) in layers.known\n            and not",
        new="            and not",
        killers=(LINEAR + "test_a_hook_that_multiplies_by_itself_has_torchs_bits",),
    ),
    Mutant(
        name="products-that-emulate-an-instruction-are-called-fast",
        breaks="whose products they are follows from processor and dtype",
        file="python/kvpager/_model/seam/linear.py",
        old='        return bool(processor["bf16"] and not processor["amx"])\n',
        new='        return bool(processor["bf16"])\n',
        killers=(LINEAR + "test_whose_products_they_are_follows_from_processor_and_dtype",),
    ),
    Mutant(
        name="a-proof-of-other-weights",
        breaks="row counts of a model with other weights are proven again",
        file="python/kvpager/_model/facts/proven_before.py",
        old='        "weights": weights,\n',
        new="",
        killers=(PROVEN + "test_a_model_that_was_changed_is_proven_again",),
    ),
    Mutant(
        name="weights-are-known-by-names-and-shapes",
        breaks="weights that differ in a bit are hashed",
        file="python/kvpager/_model/weights/digests.py",
        old="                summary.update(one.of_block(read))\n",
        new="                one is _BLAKE3 and summary.update(one.of_block(read))\n",
        killers=(
            KNOWN + "test_weights_that_differ_in_anything_are_hashed[last-bit]",
            KNOWN + "test_bytes_in_another_order_are_other_weights",
        ),
    ),
    Mutant(
        name="a-checksum-that-anybody-can-compute",
        breaks="weights cannot be made to be taken for others'",
        file="python/kvpager/_model/weights/digests.py",
        old="    checksum = _seeded(seed)\n",
        new="    checksum = _seeded(0)\n",
        killers=(
            KNOWN + "test_a_checksum_says_nothing_without_the_secret_that_it_was_made_with",
            KNOWN + "test_two_folders_have_seeds_of_their_own",
        ),
    ),
    Mutant(
        name="a-watch-knows-a-tensor-by-its-memory",
        breaks="weights in another order are other weights, also where they were read before",
        file="python/kvpager/_model/watch/contents.py",
        old="self._ranges.get(extent) if plain.is_contiguous() else None\n",
        new="self._ranges.get(extent)\n",
        killers=(KNOWN + "test_a_watch_has_the_checksums_of_what_it_read_alone",),
    ),
    Mutant(
        name="any-text-is-a-digest",
        breaks="a remembered digest that is damaged is computed again",
        file="python/kvpager/_model/weights/digests.py",
        old="    if _is_digest(digest):\n",
        new="    if digest is not None:\n",
        killers=(KNOWN + "test_what_is_no_digest_is_nothing",),
    ),
    Mutant(
        name="what-modules-hold-is-overlooked",
        breaks="a model whose modules hold another scale is proven again",
        file="python/kvpager/_model/facts/proven_before.py",
        old='        "state": _digest(*_state(model, known)),\n',
        new="",
        killers=(PROVEN + "test_functions_and_tensors_that_modules_hold_are_told_apart",),
    ),
    Mutant(
        name="a-closure-is-its-file-and-line",
        breaks="a class that was made with a function is proven each time",
        file="python/kvpager/_model/facts/proven_before.py",
        old="        return not held or name in _APART_FROM_FORWARDS\n",
        new="        return True\n",
        killers=(PROVEN + "test_a_class_that_was_made_with_a_function_is_proven_each_time",),
    ),
    Mutant(
        name="the-behaviour-of-the-weights-before",
        breaks="weights that change in an engine have a behaviour of their own",
        file="python/kvpager/_model/facts/opening.py",
        old='        found = dataclasses.replace(known, behaviour="")\n',
        new="        found = known\n",
        killers=(PROVEN + "test_weights_that_change_after_a_second_start_change_the_fingerprint",),
    ),
    Mutant(
        name="a-product-on-the-way-is-the-result",
        breaks="a head that torch computes after all is tried in every count",
        file="python/kvpager/_model/seam/linear.py",
        old="any(made is out and any(x is each for each in given) for x, out in noting.products)",
        new="bool(noting.products)",
        killers=(
            LINEAR + "test_a_head_that_torch_computes_after_all_is_tried_in_every_count[with_hook]",
            LINEAR
            + "test_a_head_that_torch_computes_after_all_is_tried_in_every_count[with_hook_before]",
        ),
    ),
    Mutant(
        name="a-forward-of-anybodys-is-exchanged",
        breaks="a forward that somebody has put in torch.nn.Linear computes its layers",
        file="python/kvpager/_model/seam/linear.py",
        old="    if _file_of(own) != _TORCHS:\n",
        new="    if own is None:\n",
        killers=(LINEAR + "test_a_forward_of_somebody_elses_computes_all_layers",),
    ),
    Mutant(
        name="memory-is-where-it-was-recorded",
        breaks="weights that were moved are not read where they were",
        file=RECORDINGS,
        old="        return self._places() == self._addresses\n",
        new="        return True\n",
        killers=(RECORDED + "test_weights_that_were_moved_are_not_read_where_they_were",),
    ),
    Mutant(
        name="hooks-of-all-modules-are-passed-over",
        breaks="hooks of all modules see every forward",
        file=RECORDINGS,
        old="        self._hooks = [*_GLOBAL_HOOKS]\n",
        new="        self._hooks = []\n",
        killers=(RECORDED + "test_hooks_of_all_modules_that_look_see_every_forward[after]",),
    ),
    Mutant(
        name="objects-in-the-place-of-functions-are-overlooked",
        breaks="a proof is not taken where something else stands in a function's place",
        file="python/kvpager/_model/facts/proven_before.py",
        old="        found.update((name, key, what) for key, what in _others(owner))\n",
        new="",
        killers=(
            PROVEN + "test_an_object_in_the_place_of_a_function_is_proven_each_time[partial]",
            PROVEN + "test_a_builtin_function_in_the_place_of_another_is_proven_again",
        ),
    ),
    Mutant(
        name="a-recording-that-nobody-tried",
        breaks="a recording is replayed only if it has the model's bits",
        file=RECORDINGS,
        old=" or not all(same_bits(a, b) for a, b in pairs):",
        new=":",
        killers=(
            RECORDED + "test_a_recording_with_other_bits_is_never_replayed",
            RECORDED + "test_a_recording_whose_attention_gets_other_bits_is_never_replayed",
        ),
    ),
    Mutant(
        name="a-number-that-was-read-is-kept",
        breaks="what depends on a number of a tensor is not recorded",
        file="python/kvpager/_model/identity/reading.py",
        old="    torch.Tag.data_dependent_output: _READ,\n",
        new="",
        killers=(RECORDED + "test_what_may_be_otherwise_next_time_is_refused",),
    ),
    Mutant(
        name="hooks-are-left-out",
        breaks="a hook that looks sees every forward",
        file=RECORDINGS,
        old="recording is None or self._watched() or not",
        new="recording is None or not",
        killers=(RECORDED + "test_hooks_that_look_see_every_forward",),
    ),
    Mutant(
        name="everybodys-python-is-left-out",
        breaks="modules whose Python may do more than compute run as they are",
        file=RECORDINGS,
        old="    return packages <= {*_KNOWN} and",
        new="    return True or",
        killers=(RECORDED + "test_models_with_modules_or_methods_of_others_run_as_they_are",),
    ),
    Mutant(
        name="calls-of-torch-are-not-tried-alone",
        breaks="a call is part of a program only if that has torch's bits",
        file="python/kvpager/_runtime/execution/programs.py",
        old="return ops if is_product or self._alike.same(node, args, kwargs) else None",
        new="return ops",
        killers=(PROGRAMS + "test_a_call_with_other_bits_is_no_part_of_a_program",),
    ),
    Mutant(
        name="memory-is-used-again-while-it-is-read",
        breaks="tensors that are needed at the same time have places of their own",
        file="python/kvpager/_runtime/execution/programs.py",
        old="live = [one for one in live if one[2] >= begins[key]]",
        new="live = [one for one in live if one[2] > begins[key]]",
        killers=(PROGRAMS + "test_what_is_known_between_two_calls_of_torch_is_one_program",),
    ),
    Mutant(
        name="memory-of-what-was-returned-as-it-is-is-used-again",
        breaks="what torch returned may be what it was given, which stays as long",
        file="python/kvpager/_runtime/execution/programs.py",
        old="last = max((ends.get(key, 0) for key in _memory(action)), default=0)",
        new="last = 0",
        killers=(PROGRAMS + "test_what_is_known_between_two_calls_of_torch_is_one_program",),
    ),
    Mutant(
        name="products-at-once-share-memory",
        breaks="products that are computed at once write to memory of their own",
        file="python/kvpager/_runtime/execution/programs.py",
        old="                    yield [tensor for op in group for tensor in op.tensors]\n",
        new="                    yield from ([*op.tensors] for op in group)\n",
        killers=(
            PROGRAMS + "test_products_that_are_computed_at_once_write_to_memory_of_their_own",
        ),
    ),
    Mutant(
        name="results-are-overwritten",
        breaks="what a replay returned stays as it is",
        file="python/kvpager/_runtime/execution/programs.py",
        old='            return self._graph.call_method("clone", (given,))\n',
        new="            return given\n",
        killers=(PROGRAMS + "test_a_result_stays_as_it_is_when_more_is_replayed",),
    ),
    Mutant(
        name="writes-in-place-are-left-out",
        breaks="a recorded call that writes to a tensor is run",
        file="python/kvpager/_runtime/execution/programs.py",
        old='        elif not node.meta["acts"] and all(',
        new="        elif all(",
        killers=(RECORDED + "test_a_recording_computes_the_same_of_other_numbers",),
    ),
    Mutant(
        name="means-in-another-order",
        breaks="a mean is summed in torch's order",
        file="csrc/compute/program_isa.cc",
        old="  constexpr int kAtOnce = 4;\n",
        new="  constexpr int kAtOnce = 2;\n",
        killers=(PROGRAM + "a mean is summed in eight lanes, of four vectors at a time",),
    ),
    Mutant(
        name="operands-are-not-checked",
        breaks="a program refuses operands outside of its memory",
        file="csrc/compute/program.cc",
        old="if (!fits || last >= (there - operand.offset) / size) {",
        new="if (!fits) {",
        killers=(
            PROGRAM + "operands outside of their memory are refused, and those that an operation"
            " cannot have",
        ),
    ),
    Mutant(
        name="silu-in-another-order",
        breaks="SiLU has the exponential that torch's vectors have",
        file="csrc/compute/program_isa.cc",
        old="p = add(fma(mul(r, r), p, r), splat(1.0f));",
        new="p = fma(mul(r, r), p, add(r, splat(1.0f)));",
        killers=(
            PROGRAM + "SiLU has the bits of its written order in every tier, and at most 3 ulp of"
            " error",
        ),
    ),
    Mutant(
        name="tangent-without-its-pairs",
        breaks="GELU has the tangent that torch's vectors have",
        file="csrc/compute/gelu_isa.h",
        old="  return {inverse, mul(inverse, short_of_one(a, inverse))};",
        new="  return {inverse, splat(0.0f)};",
        killers=(PROGRAMS + "test_calls_that_are_known_have_the_bits_of_torch",),
    ),
    Mutant(
        name="silu-of-elements-that-torch-computes-one-by-one",
        breaks="SiLU is part of a program only where torch computes it in vectors alone",
        file="python/kvpager/_runtime/execution/operations.py",
        old=" and made.numel() % TORCH_STEP == 0",
        new="",
        killers=(PROGRAMS + "test_other_calls_stay_torchs",),
    ),
    Mutant(
        name="sinks-of-a-program-are-left-out",
        breaks="attention of a program has its sinks",
        file="csrc/compute/program.cc",
        old="    made.sinks = sinks->data();\n",
        new="",
        killers=(
            PROGRAM + "attention gets an instruction's tensors and sinks, in order, and its error"
            " ends the run",
        ),
    ),
    Mutant(
        name="attention-reads-what-a-program-cannot",
        breaks="attention of a program is given copies of what a program cannot read",
        file="python/kvpager/_runtime/execution/programs.py",
        old="if self._readable(made) and made.stride(-1) == 1:",
        new="if True:",
        killers=(
            PROGRAMS + "test_attention_gets_its_keywords_and_copies_of_what_a_program_cannot_read",
        ),
    ),
    Mutant(
        name="damage-in-a-replay-has-no-place",
        breaks="an error of attention names the positions of a damaged chunk, also in a replay",
        file="csrc/snapshot/chunk_source.cc",
        old="chunk * layout().chunk_tokens, record(chunk).valid};",
        new="0, record(chunk).valid};",
        killers=(
            RECORDED + "test_an_error_in_a_replay_names_its_place_and_leaves_the_session_as_it_was",
        ),
    ),
    Mutant(
        name="long-programs-cannot-be-interrupted",
        breaks="an interrupt ends a program between two attentions",
        file="csrc/bindings/program.cc",
        old="        interruptible.check();\n",
        new="",
        killers=(PROGRAMS + "test_an_interrupt_ends_a_long_program",),
    ),
    Mutant(
        name="an-expert-reads-another-rows-input",
        breaks="a row times the matrix that it chose has the bits of that product alone",
        file="csrc/compute/linear_experts.cc",
        old="grouped.rows[static_cast<size_t>(place)] / params.choices;",
        new="place / params.choices;",
        killers=(
            KERNEL + "a row times the matrix that it chose has the bits of that product alone",
        ),
    ),
    Mutant(
        name="unknown-experts-are-read",
        breaks="an expert that is not there is refused before anything is written",
        file="csrc/compute/linear_experts.cc",
        old="if (expert < 0 || expert >= params.experts) {",
        new="if (expert < 0) {",
        killers=(KERNEL + "an expert that is not there is refused before anything is written",),
    ),
    Mutant(
        name="transposed-experts-are-taken",
        breaks="experts of a kind that is not multiplied here stay transformers'",
        file="python/kvpager/_model/seam/expert_products.py",
        old='        and not getattr(module, "is_transposed", True)\n',
        new="",
        killers=(
            EXPERTS
            + "test_transposed_and_foreign_experts_stay_transformers_and_are_proven_as_such",
        ),
    ),
    Mutant(
        name="products-of-experts-are-not-in-the-fingerprint",
        breaks="a snapshot of transformers' experts is refused where they are kvpager's products",
        file="python/kvpager/_model/seam/linear.py",
        old='            self.version += ", experts"\n',
        new="            pass\n",
        killers=(
            EXPERTS + "test_mixtures_are_taken_however_transformers_runs_their_experts[qwen3_moe]",
        ),
    ),
    Mutant(
        name="a-recording-of-a-changed-model-is-kept",
        breaks="nothing is kept of a model that was another while it was recorded",
        file=RECORDINGS,
        old="        check()\n",
        new="",
        killers=(
            RECORDED + "test_nothing_is_kept_of_a_model_that_was_another_while_it_was_recorded",
        ),
    ),
    Mutant(
        name="products-before-their-weights",
        breaks="a product stays behind the operation that makes its weight",
        file="python/kvpager/_runtime/execution/programs.py",
        old="if storage(other.out) in {*map(storage, op.read)}:",
        new="if storage(other.out) == storage(op.read[0]):",
        killers=(PROGRAMS + "test_products_stay_behind_what_makes_their_weights",),
    ),
    Mutant(
        name="every-model-attends-over-the-running-forward",
        breaks="another model that a hook runs within a forward attends as it does",
        file="python/kvpager/_model/seam/attention.py",
        old="(owned is None or config is None or id(config) in owned.configs)",
        new="True",
        killers=(
            BESIDE
            + "test_another_model_that_a_hook_runs_within_a_forward_attends_as_it_does"
            + "[of an engine that was closed]",
        ),
    ),
    Mutant(
        name="a-model-may-attend-within-its-own-forward",
        breaks="a model that is called within its own forward is an error and no other bits",
        file="python/kvpager/_model/seam/attention.py",
        old="    if layer in attended:\n",
        new="    if False:\n",
        killers=(
            BESIDE
            + "test_a_model_that_is_called_within_its_own_forward_is_an_error_and_no_other_bits",
        ),
    ),
    Mutant(
        name="processors-compute-by-kvpagers-products",
        breaks="a processor of logits that calls the model has transformers' bits",
        file="python/kvpager/_runtime/execution/runner.py",
        old="with computing(None):",
        new="with computing(self._linear):",
        killers=(
            BESIDE + "test_a_processor_of_logits_that_calls_the_model_has_its_bits_in_every_mode",
        ),
    ),
    Mutant(
        name="weights-are-pinned-to-their-memory",
        breaks="the memory of a model's weights can be resized after an engine",
        file="python/kvpager/_model/weights/digests.py",
        old="np.from_dlpack(_on_host(block))",
        new="_on_host(block).numpy()",
        killers=(BESIDE + "test_memory_of_weights_can_be_resized_after_an_engine",),
    ),
    Mutant(
        name="methods-of-classes-are-not-watched",
        breaks="a method that a class is given is a change of the model",
        file="python/kvpager/_model/watch/structure.py",
        old="            self._add(each.__name__, each, class_dictionary(each))\n",
        new="            pass\n",
        killers=(
            "model/test_changed_models.py::"
            "test_a_method_that_a_class_is_given_is_a_change[True-__call__]",
        ),
    ),
)

"""Devices: tensors where the model is, and bits that say what computed them."""

from mutants.mutant import Mutant

GRAPHS = "model/test_graphs.py::"
ENGINE = "model/test_device_engine.py::"
SIMULATED = "model/test_device_simulated.py::"
PAGER = "python/test_device_pager.py::"
RESIDENCY = "cpp/pager/device_residency_test.cc::"
WORK = "cpp/cuda/work_test.cc::"
WAVES = "waves of staged chunks, each in a call of its own, have the bits of one call"
TENSOR_WAVES = "cpp/cuda/attend_tensor_test.cc::" + WAVES
REFERENCE_WAVES = "cpp/cuda/attend_reference_test.cc::" + WAVES
LINEAR_TEST = "cpp/cuda/linear_test.cc::"
LINEAR_ORDER = LINEAR_TEST + "16-bit dtypes have the order of operations that is written down"
LINEAR_ROWS = (
    LINEAR_TEST + "a row has the same bits on a device among any number of rows, at any place"
)
MIXES = SIMULATED + "test_an_engine_of_a_model_on_a_gpu_mixes_no_devices"

DEVICES = (
    Mutant(
        name="rows-of-the-head-are-chosen-by-an-index-on-the-cpu",
        breaks="every tensor that meets the model is where the model is",
        file="python/kvpager/_model/seam/causal_lm.py",
        old="torch.tensor(index, device=hidden.device)",
        new='torch.tensor(index, device="cpu")',
        killers=(MIXES,),
    ),
    Mutant(
        name="positions-stay-on-the-cpu",
        breaks="every tensor that meets the model is where the model is",
        file="python/kvpager/_runtime/execution/runner.py",
        old="self._decoded(forward, self._on_device(tokens), self._on_device(positions))",
        new="self._decoded(forward, self._on_device(tokens), torch.from_numpy(positions))",
        killers=(MIXES,),
    ),
    Mutant(
        name="made-up-rows-stay-on-the-cpu",
        breaks="the row proof runs on the model's device",
        file="python/kvpager/_model/proof/cancelling.py",
        old="pairs.equal(rows, generator).to(weight.dtype).to(weight.device)",
        new="pairs.equal(rows, generator).to(weight.dtype)",
        killers=(SIMULATED + "test_the_row_proof_and_the_table_of_shapes_run_where_the_model_is",),
    ),
    Mutant(
        name="outputs-are-made-on-the-cpu",
        breaks="attention's output is where its queries are",
        file="python/kvpager/pager/forward.py",
        old="torch.empty(shape, dtype=q.dtype, device=q.device)",
        new="torch.empty(shape, dtype=q.dtype)",
        killers=(
            MIXES,
            SIMULATED + "test_the_package_says_of_every_tensor_it_makes_where_it_is_to_be",
        ),
    ),
    Mutant(
        name="attention-is-what-the-device-likes",
        breaks='attention="reference" is the CPU\'s order of operations on every device',
        file="python/kvpager/pager/pager.py",
        old="    options.attention = config.attention\n",
        new="",
        killers=(ENGINE + "test_the_reference_order_gives_the_cpus_bits_end_to_end",),
    ),
    Mutant(
        name="tensor-cores-have-the-cpus-name",
        breaks="equal fingerprints mean equal bits: the fingerprint says which attention it was",
        file="python/kvpager/pager/pager.py",
        old='    return version if name == "reference" else f"{name} {version}"\n',
        new="    return version\n",
        killers=(
            ENGINE + "test_a_snapshot_of_tensor_cores_is_refused_elsewhere_or_taken_as_approximate",
        ),
    ),
    Mutant(
        name="tensors-of-any-device-are-taken",
        breaks="a tensor on another device is refused, never read as if it were here",
        file="csrc/bindings/tensor.cc",
        old="  require_place(name, t.device, place);\n",
        new="",
        killers=(
            "python/test_device_tensors.py::"
            "test_a_tensor_on_another_device_is_refused_naming_both_and_the_forward_goes_on",
        ),
    ),
    Mutant(
        name="a-graph-that-nobody-tried",
        breaks="a graph is replayed only if it has the bits of its operations",
        file="python/kvpager/_runtime/execution/graphs.py",
        old="                if same_bits(hidden, expected):\n",
        new="                if hidden.shape == expected.shape:\n",
        killers=(GRAPHS + "test_a_graph_with_other_bits_is_never_replayed",),
    ),
    Mutant(
        name="a-graph-of-memory-that-is-gone",
        breaks="a graph that writes to memory that was allocated again is captured again",
        file="python/kvpager/_runtime/execution/graphs.py",
        old="            if known is None or known.generation == self._pager.generation:\n",
        new="            if known is None or known.generation <= self._pager.generation:\n",
        killers=(GRAPHS + "test_what_was_captured_before_memory_moved_is_captured_again",),
    ),
    Mutant(
        name="every-device-has-shared-memory-enough",
        breaks="tensor attention is chosen only where a device can launch it",
        file="csrc/pager/device_backend.cc",
        old="shared > 0 && shared <= device.info().shared_block_bytes;",
        new="shared > 0 && device.info().shared_block_bytes > 0;",
        killers=(
            RESIDENCY + "a device without the shared memory for tensor attention attends in the "
            "reference order",
        ),
    ),
    Mutant(
        name="few-splits-crowd-on-few-blocks",
        breaks="few splits of a row lie on as many multiprocessors as there are",
        file="csrc/cuda/attend_tensor_items.cuh",
        old="static_cast<uint32_t>(warp * blocks + block);",
        new="static_cast<uint32_t>(block * 4 + warp + 0 * blocks);",
        killers=(
            WORK + "one row that decodes keeps a block on every multiprocessor from 8K tokens on",
        ),
    ),
    Mutant(
        name="staged-slices-are-looked-for-where-they-were",
        breaks="a staged slice is read where it was staged",
        file="csrc/pager/device_staging.cc",
        old="    if (entry.staged >= 0) entry.staged = place[static_cast<size_t>(entry.staged)];\n",
        new="    static_cast<void>(entry);\n",
        killers=(RESIDENCY + "slots are staged by one call for each layer, wherever they lie",),
    ),
    Mutant(
        name="a-walk-begins-anew-in-every-wave",
        breaks="attention in waves has the bits of one call",
        file="csrc/cuda/attend_tensor_items.cuh",
        old="KVP_DEVICE bool first() const { return begin == 0; }",
        new="KVP_DEVICE bool first() const { return true; }",
        killers=(TENSOR_WAVES,),
    ),
    Mutant(
        name="states-of-a-wave-are-folded-into-nothing",
        breaks="attention in waves has the bits of one call",
        file="csrc/cuda/attend_tensor_merge.cuh",
        old="  if (item.span.first) {\n",
        new="  if (item.span.first || true) {\n",
        killers=(TENSOR_WAVES,),
    ),
    Mutant(
        name="a-row-sees-splits-beyond-its-wave",
        breaks="attention in waves has the bits of one call",
        file="csrc/cuda/attend_reference.cuh",
        old="  const int64_t end = after < span.end ? after : span.end;\n",
        new="  const int64_t end = after;\n",
        killers=(REFERENCE_WAVES,),
    ),
    Mutant(
        name="waves-are-all-looked-for-in-one-half",
        breaks="a staged slice is read where it was staged",
        file="csrc/pager/device_staging.cc",
        old="static_cast<int64_t>((table + wave) % 2)",
        new="static_cast<int64_t>(table)",
        killers=(
            RESIDENCY + "what staging does not hold at once is brought in wave by wave, each slice "
            "once",
        ),
    ),
    Mutant(
        name="a-larger-window-reads-what-was-not-staged",
        breaks="a layer reads no slice that was not brought in",
        file="csrc/pager/device_staging.cc",
        old="(half.window == 0 || (window > 0 && window <= half.window))",
        new="(half.window >= 0 || window > 0)",
        killers=(
            RESIDENCY + "a layer with a window is brought what it sees, once its window is known",
        ),
    ),
    Mutant(
        name="few-rows-on-a-device-add-splits-from-the-last",
        breaks="16-bit products on a device have the order of operations that is written down",
        file="csrc/cuda/linear_few.cuh",
        old="shared[warp * Shape::kRows * Shape::kOutputs +",
        new="shared[(there - 1 - warp) * Shape::kRows * Shape::kOutputs +",
        killers=(LINEAR_ORDER,),
    ),
    Mutant(
        name="many-rows-on-a-device-add-a-depth-in-one-chain",
        breaks="a row has the same bits on a device among any number of rows",
        file="csrc/cuda/linear_many.cuh",
        old="if ((stage + 1) % (kSplit / Shape::kStageDepth) == 0 || stage + 1 == stages) {",
        new="if (stage + 1 == stages) {",
        killers=(LINEAR_ORDER, LINEAR_ROWS),
    ),
    Mutant(
        name="rows-by-element-lie-otherwise-in-an-instruction",
        breaks="rows that cannot be read 16 bytes at a time have the same bits",
        file="csrc/cuda/linear_few.cuh",
        old="out.x[i / 2] |= element << (16 * (i % 2));",
        new="out.x[i / 2 ^ 2] |= element << (16 * (i % 2));",
        killers=(
            LINEAR_TEST
            + "a product whose rows cannot be read 16 bytes at a time has the same bits",
        ),
    ),
    Mutant(
        name="lanes-of-a-device-are-added-from-the-nearest",
        breaks="float32 products on a device have the processor's bits",
        file="csrc/cuda/linear_lanes.cuh",
        old="for (int width = kLanes / 2; width >= 1; width /= 2)",
        new="for (int width = 1; width < kLanes; width *= 2)",
        killers=(LINEAR_TEST + "float32 on a device has the bits of the processor's products",),
    ),
    Mutant(
        name="a-gpus-products-are-kvpagers-unasked",
        breaks='linear="auto" is torch\'s on a GPU',
        file="python/kvpager/_model/facts/checked_model.py",
        old='    if asked == "kvpager":\n',
        new='    if asked == "kvpager" or place.kind == "cuda":\n',
        killers=("model/test_linear.py::test_on_a_gpu_they_are_kvpagers_only_if_asked_for",),
    ),
)

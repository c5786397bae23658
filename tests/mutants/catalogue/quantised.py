"""Mutants of what is known of quantised weights, and of where weights are."""

from __future__ import annotations

from mutants.mutant import Mutant

QUANTISED_MODELS = "model/test_quantised.py::"
PLACEMENT = "model/test_placement.py::"
HELD = "python/kvpager/_model/weights/held.py"
UNITS = "python/kvpager/_model/proof/units.py"
STRUCTURE = "python/kvpager/_model/watch/structure.py"
BETWEEN = "python/kvpager/_model/proof/between.py"
OPERATIONS = "python/kvpager/_model/proof/operations.py"
WEIGHTS = "python/kvpager/_model/weights/supported.py"
PLACES = "python/kvpager/_model/weights/supported.py"

QUANTISED = (
    Mutant(
        name="weights-that-do-not-say",
        breaks="tensors that do not say what they are made of are refused",
        file=HELD,
        old='    if tensor.device.type != "meta" and tensor.numel() and not tensor.data_ptr():\n',
        new='    if tensor.device.type == "none":\n',
        killers=(
            QUANTISED_MODELS + "test_weights_that_do_not_say_what_they_are_made_of_are_refused",
        ),
    ),
    Mutant(
        name="what-a-weight-refers-to-is-not-followed",
        breaks="each bit that a weight is made of is in the digest",
        file=HELD,
        old="        if isinstance(value, torch.Tensor):\n            self.weight(name, value)\n",
        new="        if isinstance(value, torch.Tensor):\n            pass\n",
        killers=(
            QUANTISED_MODELS
            + "test_each_bit_that_a_weight_is_made_of_is_in_the_digest[object-weight.state.scales]",
            QUANTISED_MODELS
            + "test_each_bit_that_a_weight_is_made_of_is_in_the_digest[attributes-meta.scale]",
        ),
    ),
    Mutant(
        name="attributes-of-quantised-modules-are-not-followed",
        breaks="what a quantised module keeps in attributes is in the digest",
        file=HELD,
        old="        if is_quantised(module):\n            walk.attributes(name, module)\n",
        new="        if not name:\n            walk.attributes(name, module)\n",
        killers=(
            QUANTISED_MODELS
            + "test_each_bit_that_a_weight_is_made_of_is_in_the_digest[attributes-meta.scale]",
        ),
    ),
    Mutant(
        name="objects-that-cannot-be-followed-are-taken",
        breaks="an object that cannot be followed is refused and named",
        file=HELD,
        old='            held.opaque.append((name, f"is a {name_of(type(value))}"))\n',
        new="            pass\n",
        killers=(QUANTISED_MODELS + "test_objects_that_cannot_be_followed_are_refused_and_named",),
    ),
    Mutant(
        name="memory-beside-a-dictionary-is-forgotten",
        breaks="a class with memory of its own is refused",
        file=HELD,
        old="type(value).__basicsize__ <= _Bare.__basicsize__ and not slots\n",
        new="len(slots) < 9\n",
        killers=(QUANTISED_MODELS + "test_a_class_with_memory_of_its_own_cannot_be_followed",),
    ),
    Mutant(
        name="settings-are-not-in-the-digest",
        breaks="each setting that a weight is read with is in the digest",
        file="python/kvpager/_model/weights/digests.py",
        old="    if held.settings:\n",
        new="    if not held.tensors:\n",
        killers=(
            QUANTISED_MODELS + "test_each_setting_that_a_weight_is_read_with_is_in_the_digest",
        ),
    ),
    Mutant(
        name="objects-beside-weights-are-not-watched",
        breaks="what a weight refers to is noticed where it is replaced",
        file=STRUCTURE,
        old='            self._add(name, "value", container)\n        # Another',
        new="            del name, container\n        # Another",
        killers=(
            QUANTISED_MODELS
            + "test_what_a_weight_refers_to_is_noticed_where_it_is_replaced[object-factor_changed]",
        ),
    ),
    Mutant(
        name="weights-may-be-exchanged-as-a-whole",
        breaks="a weight that was exchanged as a whole is noticed",
        file=STRUCTURE,
        old="        if self._made and list(map(id, map(vars, self._made)))",
        new="        if not self._table and list(map(id, map(vars, self._made)))",
        killers=(QUANTISED_MODELS + "test_a_weight_that_was_exchanged_as_a_whole_is_noticed",),
    ),
    Mutant(
        name="quantised-weights-are-exchanged-for-plain-ones",
        breaks="a quantised layer is tried with the weights it has",
        file=UNITS,
        old="    if not is_plain(weight) or is_quantised(module):\n        return False\n",
        new="",
        killers=(
            QUANTISED_MODELS + "test_a_layer_is_tried_with_the_tensors_that_its_weight_is_made_of",
        ),
    ),
    Mutant(
        name="rows-that-cancel-are-random-ones",
        breaks="a sum that differs in its last bits is found before they are rounded",
        file=UNITS,
        old="drawn = [cancelling_rows(lambda x: replay([x])[0], drawn[0], generator)]\n",
        new="pass\n",
        killers=(
            QUANTISED_MODELS
            + "test_a_sum_of_one_row_that_differs_in_its_last_bits_is_found_before_they_are_rounded"
            "[bfloat16]",
        ),
    ),
    Mutant(
        name="an-operation-in-a-layer-is-unknown",
        breaks="an operation of a library is tried with the layer that calls it",
        file=BETWEEN,
        old=" and pair.has_rows and not pair.whole.in_part:\n",
        new=" and pair.has_rows:\n",
        killers=(
            QUANTISED_MODELS
            + "test_an_operation_of_a_library_is_tried_with_the_layer_that_calls_it",
        ),
    ),
    Mutant(
        name="every-operation-is-in-a-layer",
        breaks="an operation outside of tried layers leaves M alone",
        file=OPERATIONS,
        old="        part = self._part is not None\n",
        new="        part = True\n",
        killers=(
            QUANTISED_MODELS
            + "test_an_operation_of_a_library_is_tried_with_the_layer_that_calls_it",
        ),
    ),
    Mutant(
        name="packed-embeddings-are-taken",
        breaks="embeddings that do not say how many tokens there are are refused",
        file=WEIGHTS,
        old=" and is_quantised(module) and _rows_of(module) != vocab:\n",
        new=" and is_quantised(module) and not vocab:\n",
        killers=(QUANTISED_MODELS + "test_packed_embeddings_and_a_packed_head_are_refused",),
    ),
    Mutant(
        name="quantised-experts-are-taken",
        breaks="quantised experts are refused",
        file=WEIGHTS,
        old="        if has_expert_weights(module):\n",
        new="        if not name:\n",
        killers=(QUANTISED_MODELS + "test_quantised_experts_are_refused",),
    ),
    Mutant(
        name="compiled-methods-run",
        breaks="a layer that decodes its weights with a compiled method is refused",
        file=WEIGHTS,
        old="            for value in vars(module).values()\n",
        new='            for value in [vars(module).get("forward")]\n',
        killers=(
            QUANTISED_MODELS
            + "test_a_layer_that_decodes_its_weights_with_a_compiled_method_is_refused",
        ),
    ),
    Mutant(
        name="weights-are-watched-as-they-were-loaded",
        breaks="what a first forward packs is what an engine watches",
        file="python/kvpager/_model/facts/opening.py",
        old="    settle_weights(model)\n",
        new="    settle_weights(torch.nn.Module())\n",
        killers=(
            QUANTISED_MODELS + "test_weights_that_a_first_forward_packs_are_what_an_engine_watches",
        ),
    ),
    Mutant(
        name="hooks-that-move-nothing-are-additions",
        breaks="hooks that move nothing change nothing",
        file=PLACES,
        old='    if name == "forward":\n        return only_aligns(module)\n',
        new='    if name == "forward":\n        return False\n',
        killers=(PLACEMENT + "test_hooks_that_move_nothing_change_nothing[{'': 'cpu'}]",),
    ),
    Mutant(
        name="hooks-hide-a-patch",
        breaks="a hook around a patched forward is an addition",
        file=PLACES,
        old='getattr(own.get("_old_forward"), "__func__", None) is type(module).forward\n',
        new="True\n",
        killers=(PLACEMENT + "test_a_hook_around_a_patched_forward_is_an_addition",),
    ),
    Mutant(
        name="hooks-may-move-rows",
        breaks="a hook that moves rows elsewhere is refused",
        file=PLACES,
        old="        yield from _hook_problems(model, torch.device(place))\n",
        new="",
        killers=(PLACEMENT + "test_a_hook_that_moves_rows_elsewhere_is_refused",),
    ),
)

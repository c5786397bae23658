"""What is compared with the model's own attention, at the start and in `verify`."""

from mutants.mutant import Mutant

OWN = "model/test_own_attention.py::"
STOCK = "model/test_stock_relation.py::"
REFUSALS = "model/test_refusals.py::"
FILE = "python/kvpager/_model/proof/own_attention.py"

OWN_ATTENTION = (
    Mutant(
        name="mask-window-lost",
        breaks="a window that only the mask has is attended to",
        file=FILE,
        old="        note_mask_window(call.module, call.window)\n",
        new="        note_mask_window(call.module, None)\n",
        killers=(
            OWN + "test_a_window_that_only_the_mask_has_is_attended_to[phimoe-windows0]",
            OWN + "test_a_long_window_is_found_without_a_long_forward",
        ),
    ),
    Mutant(
        name="masks-not-read",
        breaks="a mask that says more than a causal window is refused",
        file="python/kvpager/_model/proof/masks.py",
        old="            if kept and mask.shape == made.shape and torch.equal(mask, before):\n",
        new="            if mask.shape == made.shape:\n",
        killers=(OWN + "test_a_bias_on_scores_is_refused",),
    ),
    Mutant(
        name="masks-asked-near-the-start-alone",
        breaks="a mask is asked as far as the model has positions",
        file="python/kvpager/_model/proof/masks.py",
        old="    last = min(max(longest, _LEAST), _MOST) - 1\n",
        new="    last = _LEAST - 1\n",
        killers=(
            OWN + "test_a_mask_of_stretches_is_refused_and_the_first_position_named",
            OWN + "test_the_window_of_a_mask_is_found_whatever_its_length[100000]",
        ),
    ),
    Mutant(
        name="own-attention-not-compared",
        breaks="what an attention does beside its keywords is refused",
        file=FILE,
        old="        if not float(apart[worst]) <= bound:\n",
        new="        if float(apart[worst]) > 1e9:\n",
        killers=(OWN + "test_an_attention_that_does_more_than_its_call_says_is_refused",),
    ),
    Mutant(
        name="packed-rows-not-compared",
        breaks="positions come from position_ids, also where nothing is promised",
        file=FILE,
        old="            if not middle <= _APART.get(ours.dtype, 0.2):\n",
        new="            if middle > 1e9:\n",
        killers=(
            OWN + "test_positions_that_follow_the_row_are_refused_also_where_nothing_is_promised",
        ),
    ),
    Mutant(
        name="transformers-always-within",
        breaks="what every way of an engine has in common is seen against transformers",
        file="python/kvpager/verify/check.py",
        old="        return self.apart <= self.bound\n",
        new="        return True\n",
        killers=(STOCK + "test_a_window_that_is_lost_is_seen_by_it_alone",),
    ),
    Mutant(
        name="compiled-models-run",
        breaks="a compiled model is refused at once",
        file="python/kvpager/_model/seam/support.py",
        old="    if compiled := compiled_part(model):\n",
        new='    if compiled := "":\n',
        killers=(
            REFUSALS
            + "test_a_compiled_model_is_refused_at_once_and_accepted_once_loaded_again[model]",
        ),
    ),
)

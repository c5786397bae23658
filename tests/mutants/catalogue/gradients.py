"""Of log-probabilities with gradients."""

from mutants.mutant import Mutant

FILE = "python/kvpager/_runtime/gradients/"
TESTS = "model/test_logprobs_with_gradients.py::"
CLOSE = TESTS + "test_gradients_are_as_close_to_float64_as_the_stock_models"
SHARED = (
    TESTS + "test_a_shared_prompt_is_computed_once_and_gets_the_gradients_of_all_its_completions"
)
SELECTED = TESTS + "test_gradients_through_a_selection_are_those_of_attention_masked_by_it"

GRADIENTS = (
    Mutant(
        name="a-gradient-forgets-the-selection",
        breaks="gradients flow to the chunks that a row selected, and to no others",
        file=FILE + "attention.py",
        old="        if chosen is None:\n            return seen\n",
        new="        if True:\n            return seen\n",
        killers=(SELECTED,),
    ),
    Mutant(
        name="a-gradient-forgets-the-window",
        breaks="gradients flow to keys within a row's window alone",
        file=FILE + "attention.py",
        old="            seen = seen & (group.key_positions > limits)\n",
        new="",
        killers=(CLOSE,),
    ),
    Mutant(
        name="a-gradient-forgets-the-soft-cap",
        breaks="gradients pass through the soft cap of scores",
        file=FILE + "attention.py",
        old="            ds.mul_(1 - capped.square())\n",
        new="            pass\n",
        killers=(CLOSE,),
    ),
    Mutant(
        name="a-gradient-forgets-the-sinks",
        breaks="attention sinks have gradients",
        file=FILE + "attention.py",
        old="            of_sinks.sub_(each.sum(-1).view_as(of_sinks))\n",
        new="",
        killers=(CLOSE,),
    ),
    Mutant(
        name="a-gradient-takes-the-first-head-of-a-group",
        breaks="the gradient of a key sums those of all query heads that share it",
        file=FILE + "attention.py",
        old="        k = torch.matmul(ds.transpose(1, 2), self.by_head(q))\n",
        new="        n = len(self.rows)\n"
        "        k = torch.matmul(ds[:, :n].transpose(1, 2), self.by_head(q)[:, :n])\n",
        killers=(CLOSE,),
    ),
    Mutant(
        name="a-shared-prompt-gets-its-last-gradient-alone",
        breaks="a prompt's keys and values get the gradients of all forwards that read them",
        file=FILE + "attention.py",
        old="            mine[first : first + len(given)] += given\n",
        new="            mine[first : first + len(given)] = given\n",
        killers=(SHARED,),
    ),
    Mutant(
        name="rows-see-other-texts-of-their-tree",
        breaks="a row's gradients flow to its own text alone",
        file=FILE + "attention.py",
        old="                earlier[row : row + part.rows, column : column + stop] = False\n",
        new="                pass\n",
        killers=(SHARED,),
    ),
    Mutant(
        name="a-changed-weight-is-differentiated-as-it-is-now",
        breaks="a backward pass after an optimiser's step raises",
        file=FILE + "scored.py",
        old="        self._require_unchanged()\n",
        new="",
        killers=(
            TESTS
            + "test_a_gradient_of_log_probabilities_is_computed_once_and_of_unchanged_weights",
        ),
    ),
    Mutant(
        name="other-bits-in-training-mode-are-accepted",
        breaks="the forward with gradients has the bits of the one without, or is refused",
        file="python/kvpager/_runtime/execution/runner.py",
        old="        if expected is not None and not all(map(same_bits, expected, found)):\n",
        new="        if False:\n",
        killers=(TESTS + "test_a_model_that_computes_otherwise_in_training_mode_is_refused",),
    ),
)

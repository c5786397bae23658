"""Mutants of what users type: text, conversations, tokens in many forms."""

from __future__ import annotations

from mutants.mutant import Mutant

ODD = "model/test_odd_arguments.py::"
TEXT = "model/test_text.py::"
CHAT = "model/test_chat.py::"
SERVING = "model/test_serving.py::"
ARGUMENTS = "python/kvpager/arguments.py"
TOKENS = "python/kvpager/tokens.py"
CONVERSATION = "python/kvpager/text/conversation.py"

FRONT_DOOR = (
    Mutant(
        name="a-turn-encodes-all-of-its-text-anew",
        breaks="answers keep the tokens they were produced with",
        file=CONVERSATION,
        old="            if not text.startswith(stretch.text, at):\n",
        new="            if stretch.text:\n",
        killers=(
            CHAT + "test_answers_keep_the_tokens_they_were_produced_with",
            CHAT + "test_a_conversation_is_computed_once",
        ),
    ),
    Mutant(
        name="a-turn-believes-that-nothing-was-edited",
        breaks="an edited message is in the text",
        file=CONVERSATION,
        old="            if not text.startswith(stretch.text, at):\n",
        new="            if at + len(stretch.text) > len(text):\n",
        killers=(CHAT + "test_thinking_that_the_template_leaves_out_is_cut_from_the_cache",),
    ),
    Mutant(
        name="a-message-keeps-its-stop-string",
        breaks="a message ends before a stop string",
        file=CONVERSATION,
        old="content = content.partition(stop)[0]",
        new="pass",
        killers=(CHAT + "test_a_stop_string_is_not_part_of_the_message",),
    ),
    Mutant(
        name="a-save-forgets-the-conversation",
        breaks="a conversation is saved with its text",
        file="python/kvpager/snapshots/freezing.py",
        old="        if conversation.messages:\n",
        new="        if not conversation.messages:\n",
        killers=(CHAT + "test_a_saved_conversation_goes_on_in_another_engine",),
    ),
    Mutant(
        name="a-chat-looks-at-its-seed-too-late",
        breaks="a wrong option changes nothing",
        file="python/kvpager/scheduling/chat.py",
        old="    generation.check_seed(seed)\n",
        new="",
        killers=(CHAT + "test_a_wrong_option_changes_nothing",),
    ),
    Mutant(
        name="a-chat-reserves-no-room",
        breaks="a turn without room changes nothing",
        file="python/kvpager/session.py",
        old="        with self.transcript.reserve(max(len(turn.ids) + most, self.length)):\n",
        new="        if most:\n",
        killers=(CHAT + "test_a_turn_without_room_is_not_taken",),
    ),
    Mutant(
        name="forks-share-metadata",
        breaks="a fork has metadata of its own",
        file="python/kvpager/text/transcript.py",
        old="copy.deepcopy(self.metadata)",
        new="self.metadata",
        killers=(CHAT + "test_forks_lead_conversations_of_their_own",),
    ),
    Mutant(
        name="half-a-character-is-told",
        breaks="no piece has half a character",
        file="python/kvpager/text/tokenizer.py",
        old="if not piece or piece.endswith(_UNFINISHED):",
        new="if not piece:",
        killers=(TEXT + "test_no_piece_has_half_a_character",),
    ),
    Mutant(
        name="a-piece-is-decoded-without-what-stands-before",
        breaks="the pieces of a text are the text",
        file="python/kvpager/text/tokenizer.py",
        old="self._tokens[min(self._told, len(self._tokens) - 1) :]",
        new="[]",
        killers=(TEXT + "test_the_pieces_of_a_text_are_the_text",),
    ),
    Mutant(
        name="a-text-that-goes-on-begins-again",
        breaks="appended text has no tokens that begin a text",
        file="python/kvpager/session.py",
        old="special_tokens=not self.length",
        new="special_tokens=True",
        killers=(TEXT + "test_text_is_prefilled_as_the_tokenizer_encodes_it",),
    ),
    Mutant(
        name="the-beginning-of-a-stop-string-is-told",
        breaks="text is held back while it may begin a stop string",
        file="python/kvpager/text/tool_calls.py",
        old="for length in range(min(len(text), len(tag) - 1), 0, -1):",
        new="for length in ():",
        killers=(TEXT + "test_text_is_held_back_while_it_may_begin_a_stop_string",),
    ),
    Mutant(
        name="a-stop-string-ends-nothing",
        breaks="a stop string ends a generation",
        file="python/kvpager/scheduling/stream.py",
        old="        if self.answer is not None and self.answer.stopped_by is not None:\n",
        new="        if False:\n",
        killers=(TEXT + "test_a_stop_string_ends_the_text_before_it_and_the_tokens_behind",),
    ),
    Mutant(
        name="vectors-before-a-prompt-are-left-out",
        breaks="a model whose adapter is no layer is refused",
        file="python/kvpager/hf/support.py",
        old='if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):',
        new="if False:",
        killers=(
            "model/test_refusals.py::test_adapters_that_put_vectors_before_a_prompt_are_refused",
        ),
    ),
    Mutant(
        name="choices-draw-alike",
        breaks="several completions of a prompt differ",
        file="python/kvpager/engine.py",
        old="its_seed = seed_after(job.seed)",
        new="pass",
        killers=(TEXT + "test_several_completions_of_a_prompt_share_its_chunks",),
    ),
    Mutant(
        name="a-given-session-keeps-what-it-held",
        breaks="a session given with a prompt is made to hold it",
        file="python/kvpager/requests/request.py",
        old="            trim_to_common(core, transcript, ids)\n",
        new="",
        killers=(SERVING + "test_a_given_session_is_made_to_hold_the_prompt",),
    ),
    Mutant(
        name="a-given-session-is-cut-before-there-is-room",
        breaks="a request without room leaves its session as it was",
        file="python/kvpager/requests/request.py",
        old="        with transcript.reserve(max(total, transcript.length)):",
        new="        if total:",
        killers=(SERVING + "test_a_prompt_without_room_leaves_its_session_as_it_was",),
    ),
    Mutant(
        name="a-cancelled-task-leaves-its-request",
        breaks="a task that is cancelled ends its request",
        file="python/kvpager/requests/streams.py",
        old="        except asyncio.CancelledError:\n            await self.aclose()\n",
        new="        except asyncio.CancelledError:\n",
        killers=(SERVING + "test_a_task_that_is_cancelled_ends_its_request",),
    ),
    Mutant(
        name="padding-is-prompt",
        breaks="the padding of a tokenizer's batch is left out",
        file=TOKENS,
        old="    return array[used]\n",
        new="    return array\n",
        killers=(TEXT + "test_what_a_tokenizer_returns_is_taken_without_its_padding",),
    ),
    Mutant(
        name="a-flag-is-what-if-takes-for-true",
        breaks="True and False are the only flags",
        file=ARGUMENTS,
        old='        raise refusal(name, value, "True or False")\n',
        new="        pass\n",
        killers=(ODD + "test_an_argument_of_another_kind_is_an_error_that_names_it",),
    ),
    Mutant(
        name="a-word-is-compared-with-anything",
        breaks="an array is no word, and an error says so",
        file=ARGUMENTS,
        old="(value is None or isinstance(value, (str, int, float))) and",
        new="",
        killers=(ODD + "test_an_argument_of_another_kind_is_an_error_that_names_it",),
    ),
    Mutant(
        name="an-answer-begins-in-its-prompt",
        breaks="an answer whose prompt was cut is no message",
        file=CONVERSATION,
        old=" or not np.array_equal(tokens[:start], prompt)",
        new="",
        killers=(CHAT + "test_an_answer_whose_prompt_was_cut_is_no_message",),
    ),
    Mutant(
        name="true-is-one",
        breaks="a bool is no integer",
        file=ARGUMENTS,
        old="    if isinstance(value, bool):\n        return None\n    if",
        new="    if",
        killers=(TEXT + "test_what_is_no_integer_is_refused",),
    ),
)

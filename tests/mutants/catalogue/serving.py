"""Mutants of the server, and of text of a grammar."""

from __future__ import annotations

from mutants.mutant import Mutant

SERVER = "python/kvpager/server/"
GRAMMAR = "python/kvpager/grammar.py"
TEXT = "model/test_grammar.py::"

SERVING = (
    Mutant(
        name="a-mask-forbids-nothing",
        breaks="text is always of its grammar",
        file=GRAMMAR,
        old="        values[: len(allowed)][~allowed] = -np.inf\n",
        new="",
        killers=(TEXT + "test_a_pattern_matches_the_whole_text",),
    ),
    Mutant(
        name="a-grammar-keeps-what-was-taken-back",
        breaks="a grammar follows the text, forwards and back",
        file=GRAMMAR,
        old="            self._matcher.rollback(len(self._consumed) - common)\n",
        new="",
        killers=(TEXT + "test_a_constraint_follows_the_text_back",),
    ),
    Mutant(
        name="unknown-fields-are-ignored",
        breaks="a field that is not implemented is refused",
        file=SERVER + "schema/common.py",
        old='    model_config = ConfigDict(extra="forbid", strict=True)\n',
        new='    model_config = ConfigDict(extra="ignore", strict=True)\n',
        killers=(
            "server/test_chat_completions.py::"
            "test_what_cannot_be_done_is_a_400_that_names_the_field",
        ),
    ),
    Mutant(
        name="a-response-is-told-before-it-is-kept",
        breaks="a response that was reported can be retrieved",
        file=SERVER + "routes/responses.py",
        old="notes={_NOTE: self.response.model_dump(), _INPUT: self.input_items}",
        new="notes={}",
        killers=("server/test_responses.py::test_a_response_can_be_retrieved_and_deleted",),
    ),
    Mutant(
        name="a-clients-words-replace-the-models",
        breaks="a turn after a call goes on from the tokens that the model wrote",
        file=SERVER + "exchange.py",
        old="                return self._behind(session, kept, [], prompt.messages[count:])\n",
        new="                return list(prompt.messages)\n",
        killers=(
            "server/test_tools.py::test_a_turn_after_a_call_goes_on_from_what_the_model_wrote",
        ),
    ),
    Mutant(
        name="system-items-hold-for-one-turn",
        breaks="system and developer items of a response hold in later turns",
        file=SERVER + "exchange.py",
        old="        held = session.messages[left_out:]\n",
        new='        held = session.messages[session.messages[0]["role"] == "system" :]\n',
        killers=(
            "server/test_prompts.py::"
            "test_system_and_developer_items_of_a_response_hold_in_later_turns",
        ),
    ),
    Mutant(
        name="tenants-share-a-salt",
        breaks="tenants share no chunk",
        file=SERVER + "service.py",
        old='        return "\\0".join(parts) if parts else None\n',
        new="        return None\n",
        killers=(
            "server/test_api_keys.py::test_a_cache_salt_separates_prompts_of_one_tenant",
            "server/test_api_keys.py::test_tenants_share_nothing",
        ),
    ),
    Mutant(
        name="a-breakpoint-is-rounded",
        breaks="a prompt is saved up to its breakpoint, to the token",
        file=SERVER + "breakpoints.py",
        old="                session.save(name, store=source.store, upto=position)\n",
        new="                session.save(name, store=source.store, upto=1 + position // 64)\n",
        killers=(
            "server/test_restarts.py::test_a_prompt_is_saved_up_to_its_breakpoint_to_the_token",
        ),
    ),
    Mutant(
        name="a-client-that-left-is-served-on",
        breaks="a client that goes away ends its request",
        file=SERVER + "production.py",
        old="                request.cancel()\n",
        new="                pass\n",
        killers=("server/test_disconnects.py::test_a_stream_that_is_left_ends_its_request",),
    ),
    Mutant(
        name="an-answer-changes-the-conversation-it-goes-on-from",
        breaks="two turns may go on from one response",
        file=SERVER + "conversations.py",
        old="lambda kept: (kept.session.fork(), kept))\n",
        new="lambda kept: (kept.session, kept))\n",
        killers=("server/test_responses.py::test_two_turns_may_go_on_from_one_response",),
    ),
    Mutant(
        name="an-older-turn-is-kept-over-a-newer-one",
        breaks="a turn that is kept during a restore is the one that goes on",
        file=SERVER + "conversations.py",
        old="            restoring.outdated = True\n",
        new="            pass\n",
        killers=(
            "server/test_kept_conversations.py::"
            "test_a_turn_that_is_kept_during_a_restore_is_the_one_that_is_read",
            "server/test_kept_conversations.py::"
            "test_a_conversation_that_is_deleted_during_a_restore_is_gone",
        ),
    ),
    Mutant(
        name="a-conversation-is-kept-before-it-is-saved",
        breaks="one that leaves memory at once is in the store",
        file=SERVER + "conversations.py",
        old="            return self._write(name, kept.session, ttl) if save else None\n",
        new="            return None\n",
        killers=(
            "server/test_kept_conversations.py::"
            "test_a_conversation_that_is_let_go_as_soon_as_it_is_kept_is_in_the_store",
        ),
    ),
    Mutant(
        name="chunks-of-a-deleted-conversation-stay",
        breaks="a conversation that is deleted leaves nothing behind, not even for prefix reuse",
        file="python/kvpager/server/conversations.py",
        old="kept.session.close(forget=chunks)",
        new="kept.session.close()",
        killers=(
            "server/test_memory.py::"
            "test_deleted_conversations_leave_no_sequence_no_block_and_no_object",
        ),
    ),
)

"""Mutants of the server, and of text of a grammar."""

from __future__ import annotations

from mutants.mutant import Mutant

RESPONSES = "server/test_responses.py::"
API_KEYS = "server/test_api_keys.py::"
KEPT_CONVERSATIONS = "server/test_kept_conversations.py::"
MEMORY = "server/test_memory.py::"
TRANSFERS = "server/test_transfers.py::"
LISTENING = "server/test_listening.py::"
CONNECTIONS = "server/test_connections.py::"
SERVER = "python/kvpager/server/"
GRAMMAR = "python/kvpager/grammar.py"
TEXT = "model/test_grammar.py::"
TOOLS = "server/test_tools.py::"
SESSIONS = "server/test_http_sessions.py::"
BACKGROUND = "server/test_background.py::"
BROWSER = "server/test_page_in_a_browser.py::"

TAKEOVER = "server/test_takeover.py::"
JOURNALS = "python/test_journals.py::"
BUCKET = "python/test_bucket_journals.py::"
STORED_JOURNALS = "python/kvpager/stores/journals.py"
SAME_EVENTS = (
    TAKEOVER + "test_the_events_are_those_of_an_uninterrupted_run_wherever_it_was_cut_off[sampling]"
)

SERVING = (
    Mutant(
        name="ids-of-a-responses-items-are-drawn",
        breaks="a response that another replica goes on with has the events that were sent",
        file=SERVER + "schema/common.py",
        old="        return prefix + blake2b(text.encode(), digest_size=16).hexdigest()\n",
        new="        return prefix + text[:0] + secrets.token_hex(16)\n",
        killers=(SAME_EVENTS,),
    ),
    Mutant(
        name="a-replica-goes-on-with-a-seed-of-its-own",
        breaks="a response that another replica goes on with has the same bits",
        file=SERVER + "response_turn.py",
        old='            self.seed = begun["seed"]\n',
        new="",
        killers=(TAKEOVER + "test_a_seed_that_was_drawn_goes_on_too",),
    ),
    Mutant(
        name="a-replica-forgets-what-was-produced",
        breaks="a response that another replica goes on with has the same bits",
        file="python/kvpager/requests/request.py",
        old="        stream.begin_with(self._known)\n",
        new="",
        killers=(SAME_EVENTS,),
    ),
    Mutant(
        name="a-kept-response-is-read-again-in-one-piece",
        breaks="events of a response that has ended have the numbers that they came with",
        file=SERVER + "response_events.py",
        old="        for length, count in lengths:\n",
        new="        for length, count in [[len(text or ''), len(logprobs)]][: len(lengths)]:\n",
        killers=(SAME_EVENTS,),
    ),
    Mutant(
        name="a-stop-ends-a-response-for-good",
        breaks="a response that a drain cuts off goes on",
        file=SERVER + "response_turn.py",
        old="        return self.lost or (self._has_journal and self.service.draining)\n",
        new="        return self.lost\n",
        killers=(
            TAKEOVER + "test_a_stream_of_a_replica_that_stops_goes_on_at_another",
            "server/test_background.py::test_what_a_drain_cut_off_goes_on_also_what_was_queued",
        ),
    ),
    Mutant(
        name="a-full-disk-ends-a-response",
        breaks="a response is answered also where the store cannot be written",
        file=SERVER + "response_turn.py",
        old="error.__cause__, (OSError, StorageError, CapacityError)):\n",
        new="error.__cause__, ()):\n",
        killers=(
            TAKEOVER
            + "test_a_store_that_cannot_be_written_costs_the_resumption_and_no_answer[create]",
        ),
    ),
    Mutant(
        name="another-models-response-goes-on",
        breaks="a replica goes on with responses of its own model and numerics alone",
        file=SERVER + "routes/responses.py",
        old='        if request["fingerprint"] != caller.service.fingerprint:\n',
        new='        if not request["fingerprint"]:\n',
        killers=(TAKEOVER + "test_a_journal_of_another_model_is_409_and_an_unknown_one_404",),
    ),
    Mutant(
        name="two-processes-hold-a-journal",
        breaks="two replicas never answer one response twice",
        file=STORED_JOURNALS,
        old="            force or (locked and self._is_of_this_machine(name))",
        new="            force or (self._is_of_this_machine(name))",
        killers=(JOURNALS + "test_only_one_holds_a_journal_until_it_lets_go",),
    ),
    Mutant(
        name="whoever-lost-a-journal-writes-on",
        breaks="two replicas never answer one response twice",
        file=STORED_JOURNALS,
        old="        return status.st_size == self._end and status.st_nlink > 0\n",
        new="        return status.st_nlink > 0\n",
        killers=(JOURNALS + "test_whoever_loses_a_journal_cannot_write_or_remove_it",),
    ),
    Mutant(
        name="a-holder-elsewhere-is-dead-at-once",
        breaks="a journal is taken from another machine once its lease is over",
        file=STORED_JOURNALS,
        old="        return now - since >= LEASE_SECONDS\n",
        new="        return now >= since\n",
        killers=(
            JOURNALS + "test_a_holder_of_another_machine_is_dead_once_its_lease_is_over",
            JOURNALS + "test_a_holder_that_hangs_loses_its_journal_once_its_lease_is_over",
        ),
    ),
    Mutant(
        name="a-shared-store-is-not-looked-at",
        breaks="a chat without a name goes on at any server of a shared store",
        file=SERVER + "conversations.py",
        old="            if self.shared and before < _LOOKED_FOR:\n",
        new="            if self.shared and before < 0:\n",
        killers=(
            "server/test_shared_store.py::"
            "test_a_chat_goes_on_at_another_server_behind_all_of_its_tokens[options0]",
        ),
    ),
    Mutant(
        name="what-another-server-saved-is-not-seen",
        breaks="a named session goes on at any server of a shared store",
        file=SERVER + "conversations.py",
        old="        if entry is None or entry.logical_digest != kept.saved:\n",
        new="        if entry is None:\n",
        killers=(
            "server/test_shared_store.py::"
            "test_a_chat_goes_on_at_another_server_behind_all_of_its_tokens[options1]",
        ),
    ),
    Mutant(
        name="a-routers-zero-is-a-claim",
        breaks="what routers add to a request at neutral values is accepted",
        file=SERVER + "options.py",
        old="    if given == 0 < own:\n        return own\n",
        new="",
        killers=(API_KEYS + "test_a_priority_before_the_tenants_own_is_refused",),
    ),
    Mutant(
        name="journals-are-plain",
        breaks="all files of an encrypted store are encrypted",
        file="python/kvpager/stores/directory.py",
        old='f"{folder}/journals", lambda: _settings_of(folder).mode, secret',
        new='f"{folder}/journals", lambda: _settings_of(folder).mode',
        killers=(
            JOURNALS + "test_a_journal_of_an_encrypted_store_shows_neither_its_text_nor_its_name",
        ),
    ),
    Mutant(
        name="a-part-in-a-bucket-replaces-anothers",
        breaks="two replicas never answer one response twice",
        file="python/kvpager/stores/bucket_journals.py",
        old="                if there is None or there[0] != data:",
        new="                if there is None:",
        killers=(JOURNALS + "test_whoever_loses_a_journal_cannot_write_or_remove_it[bucket]",),
    ),
    Mutant(
        name="a-holder-of-a-bucket-does-not-live",
        breaks="a journal is taken from another machine once its lease is over",
        file="python/kvpager/stores/bucket_journals.py",
        old='                self._bucket.put(self._prefix + _ALIVE, b"%d" % self._renewals)\n',
        new="                pass\n",
        killers=(BUCKET + "test_a_dead_holder_loses_its_journal_once_its_lease_is_over",),
    ),
    Mutant(
        name="a-damaged-part-is-believed",
        breaks="a damaged journal changes no token",
        file=STORED_JOURNALS,
        old='    return part if check == b"%08x" % zlib.crc32(part) else None\n',
        new="    return part if check else None\n",
        killers=(
            JOURNALS + "test_a_part_that_was_not_finished_or_is_damaged_is_left_out[plain-5]",
        ),
    ),
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
        file=SERVER + "response_turn.py",
        old="            await self.finish(self._output.reader.message(), notes=notes)\n",
        new="            await self.finish(self._output.reader.message(), notes={})\n",
        killers=(RESPONSES + "test_a_response_can_be_retrieved_and_deleted",),
    ),
    Mutant(
        name="a-clients-words-replace-the-models",
        breaks="a turn after a call goes on from the tokens that the model wrote",
        file=SERVER + "turn.py",
        old="                return self._behind(session, kept, [], self.messages[count:])\n",
        new="                return list(self.messages)\n",
        killers=(
            "server/test_tools.py::test_a_turn_after_a_call_goes_on_from_what_the_model_wrote",
        ),
    ),
    Mutant(
        name="system-items-hold-for-one-turn",
        breaks="system and developer items of a response hold in later turns",
        file=SERVER + "turn.py",
        old=".messages[left_out:]\n",
        new='.messages[session.messages[0]["role"] == "system" :]\n',
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
            API_KEYS + "test_a_cache_salt_separates_prompts_of_one_tenant",
            API_KEYS + "test_tenants_share_nothing",
        ),
    ),
    Mutant(
        name="a-breakpoint-is-rounded",
        breaks="a prompt is saved up to its breakpoint, to the token",
        file=SERVER + "turn.py",
        old="session.save(one.name, store=store, upto=len(one.ids))",
        new="session.save(one.name, store=store, upto=1 + len(one.ids) // 64)",
        killers=(
            "server/test_restarts.py::test_a_prompt_is_saved_up_to_its_breakpoint_to_the_token",
        ),
    ),
    Mutant(
        name="a-client-that-left-is-served-on",
        breaks="a client that goes away ends its request",
        file=SERVER + "turn.py",
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
        killers=(RESPONSES + "test_two_turns_may_go_on_from_one_response",),
    ),
    Mutant(
        name="an-older-turn-is-kept-over-a-newer-one",
        breaks="a turn that is kept during a restore is the one that goes on",
        file=SERVER + "conversations.py",
        old="            one.outdated = True\n",
        new="            pass\n",
        killers=(
            KEPT_CONVERSATIONS
            + "test_a_turn_that_is_kept_during_a_restore_is_the_one_that_is_read",
            KEPT_CONVERSATIONS + "test_a_conversation_that_is_deleted_during_a_restore_is_gone",
        ),
    ),
    Mutant(
        name="a-conversation-is-kept-before-it-is-saved",
        breaks="one that leaves memory at once is in the store",
        file=SERVER + "conversations.py",
        old="                report = self._write(name, kept.session, ttl)\n",
        new="                pass\n",
        killers=(
            KEPT_CONVERSATIONS
            + "test_a_conversation_that_is_let_go_as_soon_as_it_is_kept_is_in_the_store",
        ),
    ),
    Mutant(
        name="a-page-of-a-list-ends-with-the-first-page-of-the-store",
        breaks="a list has the conversations that were used last, in memory or saved",
        file=SERVER + "conversations.py",
        old="        if behind is not None and len(places) == most and places[-1] > behind:\n",
        new="        if True:\n",
        killers=(
            KEPT_CONVERSATIONS
            + "test_lists_and_counts_ask_the_store_a_few_times_however_many_are_in_memory",
        ),
    ),
    Mutant(
        name="conversations-fill-what-is-below-the-pool",
        breaks="conversations leave memory before their chunks leave no room to requests",
        file=SERVER + "service.py",
        old="_MOST_USED = 0.75 ",
        new="_MOST_USED = 1.00 ",
        killers=(
            KEPT_CONVERSATIONS
            + "test_conversations_leave_memory_before_their_chunks_fill_what_is_below_the_pool",
        ),
    ),
    Mutant(
        name="digests-that-go-on-begin-anew",
        breaks="a client's next turn is found by the digests that its last turn went on with",
        file=SERVER + "conversations.py",
        old="bytes.fromhex(before[-1]) if before else",
        new='b"" if before else',
        killers=(
            KEPT_CONVERSATIONS + "test_digests_that_go_on_are_those_of_the_whole_conversation",
        ),
    ),
    Mutant(
        name="chunks-of-a-deleted-conversation-stay",
        breaks="a conversation that is deleted leaves nothing behind, not even for prefix reuse",
        file="python/kvpager/server/conversations.py",
        old="kept.session.close(forget=chunks)",
        new="kept.session.close()",
        killers=(MEMORY + "test_deleted_conversations_leave_no_sequence_no_block_and_no_object",),
    ),
    Mutant(
        name="a-turn-brings-back-what-was-deleted",
        breaks="a conversation that is deleted while a turn of it runs stays deleted",
        file=SERVER + "conversations.py",
        old="                one.deleted = True\n",
        new="                pass\n",
        killers=(MEMORY + "test_a_conversation_that_is_deleted_during_a_turn_stays_deleted",),
    ),
    Mutant(
        name="what-is-saved-behind-a-deletion-stays",
        breaks="a conversation that is deleted while it is saved stays deleted",
        file=SERVER + "conversations.py",
        old="                    self._delete_saved(name)\n",
        new="                    pass\n",
        killers=(MEMORY + "test_a_conversation_that_is_deleted_while_it_is_saved_stays_deleted",),
    ),
    Mutant(
        name="an-export-stays-in-memory",
        breaks="a GET keeps nothing that was not kept before",
        file=SERVER + "routes/sessions.py",
        old="lambda kept: kept.session.fork(), keep=False)",
        new="lambda kept: kept.session.fork())",
        killers=(TRANSFERS + "test_a_get_makes_no_files_and_keeps_nothing",),
    ),
    Mutant(
        name="an-export-is-made-whole",
        breaks="of an export that nobody reads a block is in memory",
        file=SERVER + "transfers.py",
        old="        while sum(map(len, made)) < _BLOCK and",
        new="        while",
        killers=(TRANSFERS + "test_of_an_export_that_nobody_reads_a_block_is_made",),
    ),
    Mutant(
        name="a-post-without-a-type-passes",
        breaks="a POST that changes something is one that no page can send without asking",
        file=SERVER + "strangers.py",
        old="    elif not kinds and any(",
        new="    elif not kinds or any(",
        killers=(
            "server/test_strangers.py::"
            "test_a_post_without_a_type_has_a_header_that_no_page_can_send",
        ),
    ),
    Mutant(
        name="reading-a-request-takes-as-long-as-it-takes",
        breaks="--read-timeout bounds the reading of a request",
        file=SERVER + "bodies.py",
        old="        self._longest = longest or None\n",
        new="        self._longest = None\n",
        killers=("server/test_bodies.py::test_reading_a_request_has_its_time",),
    ),
    Mutant(
        name="everybody-may-use-a-unix-socket",
        breaks="the socket of --uds is its owner's alone",
        file=SERVER + "run.py",
        old="        mask = os.umask(0o177)\n",
        new="        mask = os.umask(0)\n",
        killers=(LISTENING + "test_a_unix_socket_is_its_owners_alone_and_goes_with_the_server",),
    ),
    Mutant(
        name="a-unix-socket-stays-behind",
        breaks="the socket of --uds goes with the server",
        file=SERVER + "run.py",
        old="                Path(path).unlink(missing_ok=True)\n",
        new="                pass\n",
        killers=(LISTENING + "test_a_unix_socket_is_its_owners_alone_and_goes_with_the_server",),
    ),
    Mutant(
        name="a-broken-file-of-keys-leaves-none",
        breaks="keys that hold stay where SIGHUP finds a file with an error",
        file=SERVER + "service.py",
        old='            _log.error("the keys that were read before hold on: %s", error)\n',
        new='            _log.error("the keys that were read before hold on: %s", error)\n'
        "            self.tenants = Tenants()\n",
        killers=(API_KEYS + "test_a_broken_file_of_keys_leaves_those_that_hold_and_is_logged",),
    ),
    Mutant(
        name="a-broken-file-of-keys-is-not-logged",
        breaks="the log says that SIGHUP found a file with an error",
        file=SERVER + "service.py",
        old='            _log.error("the keys that were read before hold on: %s", error)\n',
        new="",
        killers=(API_KEYS + "test_a_broken_file_of_keys_leaves_those_that_hold_and_is_logged",),
    ),
    Mutant(
        name="a-handshake-is-not-counted",
        breaks="half-done TLS handshakes are bounded in number",
        file=SERVER + "connections.py",
        old="        if not self.add(one, address):\n",
        new="        if False:\n",
        killers=(CONNECTIONS + "test_half_done_tls_handshakes_are_bounded_in_number_and_time",),
    ),
    Mutant(
        name="a-handshake-takes-as-long-as-it-takes",
        breaks="half-done TLS handshakes are bounded in time",
        file=SERVER + "connections.py",
        old="loop.call_later(self.head_seconds, self._end_handshake,",
        new="loop.call_later(3600, self._end_handshake,",
        killers=(CONNECTIONS + "test_half_done_tls_handshakes_are_bounded_in_number_and_time",),
    ),
    Mutant(
        name="all-that-was-read-is-parsed-at-once",
        breaks="no request makes another client wait: not one in chunks of one byte",
        file=SERVER + "connections.py",
        old="_PIECES = 256, 8192 ",
        new="_PIECES = 256, 1 << 30 ",
        killers=(CONNECTIONS + "test_what_comes_is_parsed_a_piece_at_a_time",),
    ),
    Mutant(
        name="an-answer-that-may-call-has-no-schema",
        breaks="an answer beside tools is a call or follows its schema",
        file=SERVER + "answers.py",
        old="Grammar.either(grammar, calls) if both and grammar else calls",
        new="calls",
        killers=(TOOLS + "test_an_answer_that_may_call_is_a_call_or_follows_its_schema",),
    ),
    Mutant(
        name="slow-bytes-are-parsed-in-large-pieces",
        breaks="bytes that take long to parse are parsed few at a time",
        file=SERVER + "connections.py",
        old="max(least, self._piece // 2) if is_slow",
        new="most if is_slow",
        killers=(CONNECTIONS + "test_what_comes_is_parsed_a_piece_at_a_time",),
    ),
    Mutant(
        name="a-session-is-replaced-unasked",
        breaks="a request with a session drops none of its text",
        file="python/kvpager/server/turn.py",
        old='        text = f"messages are the first',
        new='        return\n        text = f"messages are the first',
        killers=(
            "server/test_session_text.py::"
            "test_messages_that_are_not_the_sessions_are_refused_and_change_nothing",
        ),
    ),
    Mutant(
        name="one-new-message-is-the-whole-conversation",
        breaks="one new user message follows the session's text",
        file="python/kvpager/server/turn.py",
        old="            self._follows = True\n",
        new="",
        killers=(
            "server/test_session_text.py::test_one_new_user_message_follows_the_sessions_text",
        ),
    ),
    Mutant(
        name="two-questions-of-a-session-are-answered-at-once",
        breaks="of two answers to one session none is lost",
        file=SERVER + "turn.py",
        old="        if any(isinstance(one, ServedTurn) for one in others):\n",
        new="        if False and others:\n",
        killers=(
            SESSIONS + "test_one_question_continues_its_session_and_no_two_are_answered_at_once",
        ),
    ),
    Mutant(
        name="a-fork-of-its-first-messages-remembers-all",
        breaks="a fork of a conversation's first messages has these alone",
        file="python/kvpager/_runtime/scheduling/chat.py",
        old="held.turn(held.messages[:count], ",
        new="held.turn(held.messages, ",
        killers=(
            SESSIONS + "test_a_fork_of_its_first_messages_goes_on_as_if_the_others_had_not_been",
        ),
    ),
    Mutant(
        name="a-renamed-session-may-expire",
        breaks="a renamed session keeps its lifetime",
        file=SERVER + "conversations.py",
        old="                self.store.set_ttl(to, ttl)\n",
        new="                pass\n",
        killers=(SESSIONS + "test_a_renamed_session_keeps_its_pin_its_lifetime_and_its_text",),
    ),
    Mutant(
        name="a-stopped-answer-is-dropped",
        breaks="an answer that is stopped is kept as far as it came",
        file=SERVER + "background.py",
        old="        if keep and turn.begun:\n",
        new="        if False:\n",
        killers=(BACKGROUND + "test_an_answer_that_is_stopped_keeps_what_it_has",),
    ),
    Mutant(
        name="a-resumed-answer-replaces-what-came-since",
        breaks="an answer that was cut off drops nothing that its session got since",
        file=SERVER + "response_turn.py",
        old="        if self.keep_as != self.continues:\n",
        new="        if True:\n",
        killers=(
            BACKGROUND
            + "test_an_answer_that_a_drain_cut_off_drops_nothing_that_its_session_got_since",
        ),
    ),
    Mutant(
        name="markup-of-a-model-is-markup-of-the-page",
        breaks="HTML in an answer is shown as text",
        file=SERVER + "page/markdown.js",
        old="    html: ({ text }) => escaped(text),\n",
        new="    html: ({ text }) => text,\n",
        killers=(BROWSER + "test_markdown_of_a_model_is_shown_and_nothing_in_it_runs_or_loads",),
    ),
    Mutant(
        name="an-answer-ends-with-its-tab",
        breaks="a closed tab does not cancel an answer",
        file=SERVER + "page/page.js",
        old="stream: true, background: true, store: false",
        new="stream: true, background: false, store: false",
        killers=(
            BROWSER + "test_an_answer_goes_on_without_its_tab_and_is_read_to_its_end_in_another",
        ),
    ),
)

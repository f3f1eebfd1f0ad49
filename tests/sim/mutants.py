"""Planted bugs, one for each defence: with the defence gone the simulator has to find it within so many seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .planted import Patch, decode, prefill, requests, rows


@dataclass(frozen=True, slots=True)
class Mutant:
    """A planted bug; to be caught within so many seeds of worlds of that kind, about three times what it took."""

    plant: Callable[[Patch], None]
    kind: str
    seeds: int


MUTANTS: dict[str, Mutant] = {
    "free at the deadline": Mutant(decode.free_at_the_deadline, "quiet", 3),
    "Drained sent early": Mutant(prefill.drained_sent_early, "lossy", 6),
    "ended grants forgotten": Mutant(prefill.ended_grants_forgotten, "crowded", 75),
    "a late message revives a room": Mutant(decode.late_message_revives_room, "quiet", 3),
    "silence taken for a fence": Mutant(decode.silence_taken_for_a_fence, "rough", 9),
    "a new incarnation taken for a fence": Mutant(decode.new_incarnation_taken_for_a_fence, "deadly", 12),
    "condemned taken for quiet": Mutant(decode.condemned_taken_for_quiet, "deadly", 12),
    "pages reused when the room fails": Mutant(prefill.pages_reused_when_the_room_fails, "lossy", 3),
    "claimed blocks evicted": Mutant(rows.claimed_blocks_evicted, "shared", 9),
    "blocks go with the first room": Mutant(rows.blocks_go_with_the_first_room, "shared", 9),
    "shared before READY": Mutant(rows.shared_before_ready, "shared", 3),
    "keys without what comes before": Mutant(rows.keys_without_what_comes_before, "shared", 9),
    "one queue for all peers": Mutant(decode.one_queue_for_all_peers, "isolation", 18),
    "Landed is not Drained": Mutant(decode.landed_is_not_drained, "lossy", 3),
    "Failed taken for a proof": Mutant(decode.failed_taken_for_a_proof, "lossy", 6),
    "Released only once": Mutant(decode.released_only_once, "lossy", 6),
    "ends said once": Mutant(prefill.ends_said_once, "lossy", 6),
    "Abort said once": Mutant(decode.abort_said_once, "lossy", 42),
    "Grant said once": Mutant(decode.grant_said_once, "patient", 6),
    "Abort of an unknown grant forgotten": Mutant(prefill.abort_of_an_unknown_grant_forgotten, "lossy", 60),
    "window unheeded by decode": Mutant(decode.window_unheeded_by_decode, "quiet", 9),
    "window unheeded by prefill": Mutant(prefill.window_unheeded_by_prefill, "lossy", 6),
    "a mapping dropped under a write": Mutant(prefill.mapping_dropped_under_a_write, "deadly", 21),
    "an unknown end taken for a failure": Mutant(prefill.unknown_taken_for_failed, "lossy", 50),
    "landed short": Mutant(prefill.landed_short, "lossy", 6),
    "bytes of Landed unchecked": Mutant(prefill.landed_bytes_unchecked, "lossy", 6),
    "Landed before it is written": Mutant(prefill.landed_before_it_is_written, "quiet", 3),
    "READY with the first rank": Mutant(decode.ready_with_the_first_rank, "ranks", 6),
    "coverage unchecked": Mutant(decode.coverage_unchecked, "ranks", 6),
    "equal rows sent by all": Mutant(decode.equal_rows_sent_by_all, "ranks", 6),
    "the other ranks granted on": Mutant(decode.other_ranks_granted_on, "ranks", 6),
    "waiting Grants wait for ever": Mutant(prefill.waiting_grants_wait_for_ever, "lossy", 48),
    "silent decode kept": Mutant(prefill.silent_decode_kept, "deadly", 57),
    "ended labels forgotten": Mutant(prefill.ended_labels_forgotten, "patient", 6),
    "Cancel before Begin forgotten": Mutant(requests.cancel_before_begin_forgotten, "fleet", 60),
    "Begun said once": Mutant(requests.begun_said_once, "fleet", 27),
    "unknown rooms unanswered": Mutant(requests.unknown_rooms_unanswered, "fleet", 42),
    "a deaf writer not quarantined": Mutant(decode.deaf_writer_not_quarantined, "deadly", 21),
    "a silent peer not fenced": Mutant(decode.silent_peer_not_fenced, "deadly", 33),
    "earlier lives heard": Mutant(decode.earlier_lives_heard, "restarts", 60),
    "quarantine without a cap": Mutant(decode.quarantine_without_a_cap, "deadly", 60),
    "quarantine counted for ever": Mutant(decode.quarantine_counted_for_ever, "rough", 6),
    "a place kept by a failed room": Mutant(decode.place_kept_by_a_failed_room, "crowded", 6),
    "a deadline as a time of day": Mutant(decode.deadline_as_a_time_of_day, "patient", 3),
    "a router's death unnoticed": Mutant(requests.restart_of_a_router_unnoticed, "fleet", 24),
    "ended rooms forgotten": Mutant(requests.ended_rooms_forgotten, "fleet", 9),
    "Tokens said once": Mutant(requests.tokens_said_once, "fleet", 3),
    "a gap in Tokens unheeded": Mutant(requests.gap_in_tokens_unheeded, "fleet", 6),
    "End before its Tokens": Mutant(requests.end_before_its_tokens, "fleet", 6),
    "retried after a token": Mutant(requests.retried_after_a_token, "fleet", 15),
    "the other side not cancelled": Mutant(requests.other_side_not_cancelled, "fleet", 6),
    "a worker's restart unnoticed": Mutant(requests.restart_of_a_worker_unnoticed, "fleet", 9),
    "granted before it is ready": Mutant(rows.granted_before_it_is_ready, "growing", 3),
    "more said ready than there is": Mutant(rows.more_said_ready_than_there_is, "growing", 9),
    "Register said until the first answer": Mutant(rows.register_said_until_the_first_answer, "growing", 40),
    "held Grants forgotten": Mutant(rows.held_grants_forgotten, "growing", 9),
    "an arena that grows no more": Mutant(rows.arena_grows_no_more, "growing", 3),
    "replaced by Register": Mutant(prefill.replaced_by_register, "restarts", 57),
    "the leader dialled alone": Mutant(requests.leader_dialled_alone, "groups", 3),
    "the leader let in alone": Mutant(requests.leader_let_in_alone, "groups", 12),
    "landed with the first grant": Mutant(prefill.landed_with_the_first_grant, "groups", 12),
    "sent to who drains": Mutant(requests.sent_to_who_drains, "leaving", 21),
    "never tried again": Mutant(requests.never_tried_again, "leaving", 12),
    "checksums not compared": Mutant(rows.checksums_not_compared, "checked", 15),
    "READY before it is read": Mutant(rows.ready_before_it_is_read, "checked", 6),
    "READY with the first sum": Mutant(rows.ready_with_the_first_sum, "checked", 105),
    "rows not claimed while they are read": Mutant(rows.rows_not_claimed_while_they_are_read, "checked", 63),
    "wrong rows taken for a breach": Mutant(rows.wrong_rows_taken_for_a_breach, "checked", 15),
    "the sum of the last write": Mutant(rows.sum_of_the_last_write, "checked", 6),
}

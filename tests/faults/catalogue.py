"""The catalogue of faults: for each, the tests that show what happens, or why there is none yet.

Data only; `test_catalogue.py` checks that no fault is left out and that the tests exist. Tests are
listed by file, from the folder of the tests, each with its class if it has one. A fault may have
both tests and a reason: then the reason is for a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reason:
    """Why a fault, or a part of it, has no test yet."""

    text: str


@dataclass(frozen=True)
class Fault:
    """One row."""

    number: int
    name: str
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    not_yet: Reason | None = None

    @property
    def tests(self) -> list[str]:
        """Return its tests as pytest names them: `file.py::function`, `file.py::Class::test`."""
        return [f"{file}::{test}" for file, tests in self.files.items() for test in tests]


FAULTS = (
    Fault(
        1,
        "a worker is paused for longer than its lease",
        {
            "celery/test_crashes.py": ("test_a_paused_child_is_refused_and_its_message_answered",),
            "celery/test_pools.py": ("test_a_paused_worker_is_refused_and_its_message_answered",),
            "rq/test_rq_workers.py": ("test_a_paused_horse_is_refused",),
            "faults/test_shares.py": ("test_a_holder_is_frozen",),
            "faults/test_waiters.py": ("test_frozen",),
        },
    ),
    Fault(
        2,
        "parent and children are frozen together",
        {
            "faults/test_processes.py": ("test_a_whole_worker_is_frozen_beyond_its_lease",),
        },
    ),
    Fault(
        3,
        "a worker is killed in a body",
        {
            "celery/test_crashes.py": (
                "test_a_killed_pool_child_is_replaced_and_its_work_done_again",
            ),
            "celery/test_brokers.py": ("test_a_killed_childs_work_is_done_again",),
            "celery/test_pools.py": ("test_a_killed_workers_messages_are_done_by_another",),
            "rq/test_rq_workers.py": ("test_a_killed_work_horse_is_done_again",),
            "rq/test_rq_outages.py": ("test_a_killed_worker_and_horse_lose_nothing",),
            "faults/test_shares.py": (
                "test_a_holder_is_killed",
                "test_the_last_reader_is_killed",
                "test_a_writer_that_waits_is_killed",
            ),
            "faults/test_waiters.py": ("test_killed", "test_the_holder_is_killed"),
        },
    ),
    Fault(
        4,
        "a worker is killed between its commit and its acknowledgement",
        {
            "crashes/test_crash_points.py": ("test_killed_at_any_boundary_there_is_one_effect",),
        },
    ),
    Fault(
        5,
        "a C call keeps the interpreter for longer than the lease",
        {
            "faults/test_processes.py": (
                "TestStuckInC::test_the_holder_learns_at_once_and_commits_if_no_other_claimed",
                "TestStuckInC::test_if_another_claimed_its_commit_is_refused",
            ),
            "celery/test_pools.py": ("test_a_greenlet_that_never_yields_keeps_its_lease",),
        },
    ),
    Fault(
        6,
        "a body forks",
        {
            "unit/test_lease.py": ("test_a_forked_child_holds_nothing",),
            "unit/test_watchdog.py": (
                "test_the_thread_renews_by_itself_and_a_forked_child_keeps_nothing",
            ),
            "integration/transactions/test_transactions.py": (
                "test_a_child_that_leaves_the_block_ends_nothing",
                "test_a_child_that_unwinds_ends_nothing",
                "test_a_child_cannot_commit_for_its_parent",
            ),
        },
    ),
    Fault(
        7,
        "a holder gets almost no CPU",
        {
            "faults/test_processes.py": ("test_a_starved_holder_learns_of_it_and_is_refused",),
        },
    ),
    Fault(
        8,
        "the lock server is paused",
        {
            "faults/test_lock_server.py": (
                "TestPaused::test_the_ledger_decides_and_work_goes_on",
                "TestPaused::test_with_locks_only_the_deadline_stays_and_then_the_lease_is_lost",
            ),
            "integration/locks/test_redis_faults.py": (
                "TestSilence::test_paused_server",
                "TestSilence::test_done_later",
            ),
            "faults/test_lock_table.py": (
                "TestFrozen::test_the_ledger_decides_and_work_goes_on",
                "TestFrozen::test_with_locks_only_the_lease_is_lost",
            ),
            "faults/test_advisory_locks.py": ("TestServer::test_frozen",),
        },
    ),
    Fault(
        9,
        "the lock server's reply is lost",
        {
            "integration/locks/test_redis_faults.py": (
                "TestLostReply::test_of_acquire",
                "TestLostReply::test_of_acquire_and_of_its_retry",
                "TestLostReply::test_of_renew",
                "TestLostReply::test_of_release",
                "TestLostReply::test_of_hand_over",
            ),
            "unit/test_watchdog.py": (
                "test_an_unanswered_renewal_leaves_the_deadline_and_is_tried_again",
            ),
            "faults/test_lock_table.py": (
                "TestReplyLost::test_a_release_that_was_not_answered",
                "TestReplyLost::test_of_a_dead_connection_it_is_asked_again",
            ),
        },
    ),
    Fault(
        10,
        "the lock server is emptied",
        {
            "celery/test_outages.py": ("test_an_emptied_lock_server_changes_nothing",),
            "contract/locks/test_locks.py": ("TestTokens::test_after_memory_loss",),
            "faults/test_shares.py": ("test_the_server_forgets",),
            "faults/test_lock_table.py": (
                "TestOfTheLedger::test_the_table_is_emptied",
                "TestOfTheLedger::test_the_table_is_dropped",
                "TestOfTheLedger::test_a_rival_costs_the_ledger_no_claim",
            ),
        },
    ),
    Fault(
        11,
        "the lock server evicts locks",
        {
            "faults/test_lock_server.py": (
                "TestEviction::test_a_lock_that_was_thrown_away_stays_taken",
                "TestEviction::test_fences_grow_over_it",
            ),
            "celery/test_celery_doctor.py": (
                "TestWorkerStart::test_findings_are_warnings_with_their_names",
            ),
        },
    ),
    Fault(
        12,
        "the lock server is full",
        {
            "faults/test_lock_server.py": (
                "TestFull::test_locks_alone_fail_closed",
                "TestFull::test_the_ledger_alone_decides",
            ),
            "integration/locks/test_redis_server_side.py": (
                "TestFullServer::test_acquire",
                "TestFullServer::test_what_still_works",
            ),
        },
    ),
    Fault(
        13,
        "the lock server is killed, with and without persistence",
        {
            "faults/test_advisory_locks.py": ("TestServer::test_killed",),
            "faults/test_lock_server.py": (
                "TestKilled::test_without_persistence_the_ledger_keeps_the_key",
                "TestKilled::test_without_persistence_fences_grow",
                "TestKilled::test_with_an_append_only_file_nothing_is_lost",
            ),
            "celery/test_outages.py": ("test_work_goes_on_while_the_spare_valkey_is_away",),
            "faults/test_lock_table.py": (
                "TestKilled::test_the_ledger_keeps_the_key",
                "TestKilled::test_a_table_with_a_log_loses_nothing",
                "TestKilled::test_a_table_without_a_log_loses_all",
                "TestKilled::test_mariadb_loses_nothing",
            ),
        },
    ),
    Fault(
        14,
        "a replica is promoted that lacks the last writes",
        {
            "faults/test_failover.py": (
                "TestStaleReplica::test_the_ledger_keeps_the_key",
                "TestStaleReplica::test_fences_grow_over_it",
            ),
            "faults/test_sentinel_failover.py": (
                "TestWithALedger::test_the_new_master_lacks_the_lease",
                "TestWithALedger::test_in_the_middle_of_it_work_goes_on",
                "TestWithALedger::test_without_replicas_to_write_to_work_goes_on",
                "TestWithLocksOnly::test_a_grant_that_no_replica_has_is_lost",
                "TestWithLocksOnly::test_a_grant_that_the_replica_has_stays",
                "TestWithLocksOnly::test_min_replicas_refuse_what_would_be_lost",
                "TestWorksAgain::test_within_a_second_of_the_groups_own_time",
                "TestWorksAgain::test_many_threads",
                "TestWorksAgain::test_a_master_that_is_held_for_down_is_not_waited_for",
            ),
            "celery/test_outages.py": ("test_a_failover_of_the_lock_server_changes_nothing",),
            "integration/locks/test_redis_connections.py": ("TestSentinel::test_failover",),
            "faults/test_lock_table.py": (
                "TestStandby::test_it_takes_no_locks_and_says_so",
                "TestStandby::test_what_it_had_not_got_is_lost",
            ),
        },
    ),
    Fault(
        15,
        "two masters, each on its side of the network",
        {
            "faults/test_failover.py": (
                "TestSplitBrain::test_two_masters_one_effect",
                "TestSplitBrain::test_after_it_heals_no_owner_ends_anothers_lease",
            ),
            "faults/test_sentinel_failover.py": (
                "TestWorksAgain::test_a_replaced_master_is_left_though_it_goes_on_granting",
                "TestWorksAgain::test_a_watchdogs_tick_notices_as_well",
                "TestWorksAgain::test_a_sentinel_that_knows_of_no_failover_is_overruled",
            ),
        },
    ),
    Fault(
        16,
        "a cluster moves a slot, or a master of it dies",
        {
            "faults/test_cluster.py": (
                "TestSlotMoves::test_a_lock_moves_with_all_that_belongs_to_it",
                "TestSlotMoves::test_one_server_is_no_cluster",
                "TestSlotMoves::test_holders_stay_in_the_middle",
                "TestSlotMoves::test_several_keys_in_the_middle",
                "TestSlotMoves::test_the_ledger_decides",
                "TestSlotMoves::test_fenced_values_follow_their_slot",
                "TestSlotMoves::test_to_a_node_without_slots",
                "TestFailover::test_locks_go_on",
                "TestFailover::test_one_effect",
                "TestFailover::test_others_are_served_meanwhile",
                "TestLostGrant::test_locks_only_it_is_granted_twice",
                "TestLostGrant::test_the_ledger_keeps_it",
                "test_a_worker_goes_on_through_a_failover",
                "test_locks_alone_through_a_failover",
            ),
            "integration/locks/test_redis_faults.py": ("TestRefusals::test_cluster",),
        },
    ),
    Fault(
        17,
        "a server's clock jumps",
        {
            "faults/test_clocks.py": (
                "TestLockServer::test_a_ledger_lets_one_of_them_in",
                "TestLockServer::test_fences_grow",
                "TestLockServer::test_a_far_deadline_is_overruled_and_reported",
                "TestLockServer::test_a_far_deadline_of_a_live_holder_keeps_others_out",
                "TestDatabase::test_forward_the_first_one_is_refused",
                "TestDatabase::test_back_no_rival_is_granted_and_fences_grow",
            ),
            "integration/locks/test_redis_server_side.py": (
                "TestTokens::test_fence_ahead_of_the_clock",
            ),
        },
    ),
    Fault(
        18,
        "the lock server forgets its scripts",
        {
            "integration/locks/test_redis_server_side.py": (
                "TestScripts::test_flushed",
                "TestScripts::test_flushed_all_the_time",
            ),
            "integration/locks/test_redlock.py": (
                "TestEverywhere::test_released_after_the_scripts_were_forgotten",
            ),
        },
    ),
    Fault(
        19,
        "some of several independent lock servers are down",
        {
            "faults/test_redlock.py": (
                "test_a_minority_in_trouble_is_not_felt",
                "test_of_a_majority_in_trouble_the_ledger_decides",
                "test_split_between_two_sides",
            ),
            "integration/locks/test_redlock.py": (
                "TestQuorum::test_of_those_that_are_configured",
                "TestRestarted::test_has_no_vote",
                "TestMinorityInTrouble::test_frozen_servers_are_not_waited_for",
                "TestMinorityInTrouble::test_what_is_away_is_not_asked_all_the_time",
                "TestMinorityInTrouble::test_late_replies_answer_nothing_else",
                "TestEverywhere::test_asked_again_without_a_majority",
            ),
            "celery/test_independent_locks.py": ("test_a_frozen_server_delays_no_task",),
        },
    ),
    Fault(
        20,
        "the reply to COMMIT is lost",
        {
            "integration/ledger/test_ledger_faults.py": (
                "test_a_commit_without_an_answer_that_happened_is_done",
                "test_a_commit_that_never_arrived_is_tried_again",
                "test_a_commit_that_never_arrived_after_a_takeover_is_stale",
                "test_an_outcome_that_cannot_be_learnt_is_said",
                "test_a_lost_reply_to_a_lone_completion_is_done",
            ),
            "integration/transactions/test_transactions.py": (
                "test_a_checkpoint_whose_commit_got_no_answer_is_not_done_twice",
            ),
            "integration/ledger/test_mariadb.py": (
                "test_a_commit_without_an_answer_that_happened_is_done",
                "test_what_became_of_a_checkpoint_is_learnt_by_its_progress",
            ),
        },
    ),
    Fault(
        21,
        "the database ends the session",
        {
            "integration/ledger/test_ledger_faults.py": (
                "test_a_session_that_the_server_ends_is_no_effect",
            ),
            "integration/ledger/test_mariadb.py": ("test_a_session_that_is_killed_is_no_effect",),
        },
    ),
    Fault(
        22,
        "a deadlock, a serialization failure, a lock timeout",
        {
            "integration/ledger/test_ledger_faults.py": ("test_a_deadlock_is_to_be_run_again",),
            "integration/run/test_deliveries.py": (
                "test_a_deadlock_runs_the_body_again_under_the_same_lease",
            ),
            "integration/ledger/test_isolation_levels.py": (
                "test_a_body_longer_than_a_renewal_is_done",
            ),
            "integration/transactions/test_transactions.py": (
                "test_duplicates_are_put_off_at_once_on_a_snapshot",
            ),
            "faults/test_database.py": (
                "test_a_lock_that_is_not_given_in_time_runs_the_body_again",
            ),
            "integration/ledger/test_mariadb.py": (
                "test_a_deadlock_runs_the_body_again",
                "test_a_body_that_swallows_a_deadlock_is_run_again",
                "test_a_lock_that_a_body_is_not_given_runs_it_again",
            ),
            "integration/ledger/test_competing_processes.py": (
                "test_processes_that_compete_have_each_effect_once",
            ),
        },
    ),
    Fault(
        23,
        "the database is down",
        {
            "celery/test_outages.py": ("test_nothing_is_lost_while_the_database_is_away",),
            "rq/test_rq_outages.py": (
                "test_without_its_database_nothing_runs_and_nothing_is_lost",
            ),
            "integration/ledger/test_ledger_faults.py": (
                "test_after_a_restart_the_next_claim_goes_through",
                "test_a_server_that_dies_in_the_block_is_no_effect",
            ),
            "integration/run/test_plain_functions.py": (
                "test_an_outage_of_the_database_is_no_crash_of_its_holders",
            ),
        },
    ),
    Fault(
        24,
        "the database's disk is full",
        {
            "faults/test_database.py": (
                "TestDiskFull::test_of_postgresql",
                "TestDiskFull::test_of_sqlite",
            ),
        },
    ),
    Fault(
        25,
        "a body takes longer than the visibility timeout",
        {
            "celery/test_deferrals.py": (
                "test_a_redelivery_during_the_body_does_not_run_twice_nor_get_lost",
                "test_a_message_never_has_more_than_two_live_copies",
            ),
        },
    ),
    Fault(
        26,
        "RabbitMQ restarts, or closes a consumer",
        {
            "faults/test_brokers.py": (
                "test_a_restart_loses_nothing",
                "test_a_body_longer_than_the_consumer_timeout_has_one_effect",
            ),
        },
    ),
    Fault(
        27,
        "a body is over its time limit",
        {
            "faults/test_limits.py": ("test_work_beyond_its_time_limit_can_be_done_again",),
            "faults/test_waiters.py": (
                "test_a_time_limit_ends_the_wait",
                "test_the_wait_ends_on_time",
            ),
            "rq/test_rq_messages.py": (
                "test_a_job_beyond_its_timeout_fails_and_can_be_done_again",
            ),
        },
    ),
    Fault(
        28,
        "a worker is shut down: warm, soft, cold",
        {
            "celery/test_workers.py": (
                "test_a_warm_shutdown_finishes_the_body",
                "test_a_cold_shutdown_gives_the_work_back",
            ),
            "faults/test_limits.py": ("test_a_soft_shutdown_gives_the_work_back",),
            "integration/run/test_deliveries.py": ("test_a_shutdown_gives_the_work_back",),
        },
    ),
    Fault(
        29,
        "one message is delivered fifty times at once",
        {
            "celery/test_workers.py": ("test_the_same_message_fifty_times_runs_one_body",),
            "rq/test_rq_workers.py": ("test_one_job_enqueued_many_times_runs_one_body",),
            "contract/ledger/test_endings.py": ("test_fifty_duplicates_leave_one_copy",),
        },
    ),
    Fault(
        30,
        "PgBouncer pools transactions",
        {
            "faults/test_database.py": (
                "TestPooler::test_the_ledger_works",
                "TestPooler::test_leases_are_renewed_and_stale_holders_refused",
                "TestPooler::test_transactions_are_bounded_and_sessions_are_not",
            ),
            "integration/locks/test_lock_table.py": (
                "TestPooled::test_locks_are_as_ever",
                "TestPooled::test_waiters_look_for_themselves",
            ),
            "faults/test_advisory_locks.py": ("test_a_pooler_of_transactions",),
            "integration/locks/test_advisory_locks.py": ("TestFindings::test_pooled",),
        },
    ),
    Fault(
        31,
        "a session at a coordination service is lost",
        {
            "faults/test_coordination.py": (
                "TestLedger::test_killed",
                "TestLedger::test_killed_for_good",
                "TestLedger::test_frozen",
                "TestLedger::test_emptied",
                "TestLedger::test_a_lease_that_is_ended",
                "TestLedger::test_a_ttl_between_two_seconds",
                "TestLocksOnly::test_killed",
                "TestLocksOnly::test_frozen",
                "TestLocksOnly::test_forgotten",
            ),
            "integration/locks/test_etcd.py": ("TestConnections::test_a_leader_that_is_killed",),
            "integration/locks/test_zookeeper.py": (
                "TestSession::test_a_session_that_has_ended",
                "TestEnsemble::test_a_leader_that_is_killed",
                "test_a_worker_that_is_frozen_or_killed",
            ),
            "faults/test_advisory_locks.py": (
                "TestSessionEnds::test_the_ledger_keeps_the_key",
                "TestSessionEnds::test_its_holder_takes_it_again",
            ),
            "integration/locks/test_advisory_locks.py": (
                "TestSession::test_killed",
                "TestDeadHolder::test_frozen",
                "TestDeadHolder::test_killed",
            ),
        },
    ),
    Fault(
        32,
        "hostile arguments",
        {
            "faults/test_arguments.py": (
                "test_what_cannot_be_a_key_is_refused_by_name",
                "test_what_can_be_a_key_is_one_of_its_own",
            ),
            "unit/test_keys.py": ("TestEncoding::test_all_others_are_percent_encoded",),
            "unit/test_keys_properties.py": ("test_a_key_or_the_documented_error",),
            "contract/locks/test_locks.py": ("TestAcquire::test_any_key",),
            "fuzz/test_fuzz.py": ("test_whatever_comes",),
        },
    ),
    Fault(
        33,
        "two calls whose keys are equal if their parts are only joined",
        {
            "unit/test_keys_properties.py": (
                "test_one_key_exactly_where_the_texts_agree",
                "test_moving_the_boundary_makes_another_key",
                "test_values_meet_their_texts",
            ),
        },
    ),
    Fault(
        34,
        "a database whose collation ignores case, accents or blanks",
        {
            "faults/test_database.py": ("test_keys_that_look_alike_are_different_keys",),
        },
    ),
)

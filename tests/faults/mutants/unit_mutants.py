"""Mistakes in single parts of umbra, each of which a short test has to notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mutant import Mutant


def _pytest(*tests: str) -> Sequence[str]:
    """Arguments of Python that run these, which are in the folder `tests`, until one fails."""
    return ("-m", "pytest", "-q", "-x", *(f"tests/{test}" for test in tests))


_BACKOFF: Final = _pytest("unit/runtime/test_restart.py")
_SYNCS: Final = _pytest(
    "unit/weights/test_transfer.py::test_corruption_after_the_copy_is_found",
    "unit/weights/test_transfer.py::test_a_version_that_is_corrupted_in_every_engine_waits_for_their_successors",
    "unit/weights/test_sync_failures.py::test_a_rank_that_gives_up_fails_the_others",
    "unit/weights/test_sync_failures.py::test_a_rank_that_never_fills_ends_the_sync_by_its_lease",
)
_LATER_RANKS: Final = _pytest(
    "unit/weights/test_sync_failures.py"
    "::test_a_rank_that_publishes_while_engines_commit_begins_the_next_sync"
)
_SYNC_STATE: Final = _pytest("unit/weights/test_sync_state.py")
_DELTAS: Final = _pytest(
    "unit/weights/test_delta_syncs.py::test_a_node_that_missed_a_version_gets_all_weights",
    "unit/weights/test_delta_syncs.py::test_a_lost_image_is_filled_with_all_weights",
    "unit/weights/test_delta_syncs.py::test_an_image_that_was_found_wrong_gets_no_delta_but_all_weights",
    "unit/weights/test_delta_syncs.py::test_a_delta_to_an_image_with_other_contents_is_refused",
)
_LEDGER: Final = _pytest(
    "unit/ledger/test_ledger_frames.py::test_a_frame_at_another_offset_is_not_accepted",
    "unit/ledger/test_ledger_state.py::test_a_leased_sample_is_trained_once_its_step_is_done_"
    "and_folded_once_covered",
    "unit/ledger/test_ledger_state.py::test_a_restored_checkpoint_reverts_later_leases_"
    "and_cuts_newer_tokens",
    "unit/ledger/test_ledger_state.py::test_the_impossible_is_refused_and_changes_nothing",
)
_SNAPSHOTS: Final = _pytest("unit/ledger/test_ledger_snapshots.py")
_STATES: Final = _pytest("unit/ledger/test_ledger_state.py")
_STORY: Final = _pytest(
    "unit/rollout/test_recorded_history.py::test_what_is_recorded_is_what_is_there[0]"
)
_VLLM_OUTPUTS: Final = _pytest("unit/engines/test_vllm_outputs.py")
_PACKING: Final = _pytest(
    "unit/trainer/test_packing.py::test_tokens_of_tools_are_fed_but_not_trained_on",
    "unit/trainer/test_packing.py::test_scores_and_gradients_are_those_of_the_model"
    "[True-qwen3-mixed lengths]",
)
_TRAIN_MODEL: Final = _pytest("unit/trainer/test_train_model.py")
_SAVES: Final = _pytest("process/trainer/test_background_saves.py")
_JOB_RULES: Final = _pytest("unit/runtime/test_job_rules.py")

_RPC_MUTANTS: Final[Sequence[Mutant]] = (
    # A call that is not idempotent is sent again after its actor was replaced.
    Mutant(
        name="call made twice",
        path="runtime/rpc/rpc_client.py",
        old="retry = method in connection.idempotent and self._resolver is not None",
        new="retry = self._resolver is not None",
        command=_pytest(
            "process/runtime/test_rpc_peers.py::test_a_call_that_is_not_idempotent_is_not_retried_"
            "but_the_next_one_finds_the_actor"
        ),
        says=r"DID NOT RAISE .*ConnectionLost",
    ),
    Mutant(
        name="stale incarnation accepted",
        path="runtime/rpc/rpc_server.py",
        old="if incarnation != self._incarnation:",
        new="if incarnation > self._incarnation:",
        command=_pytest(
            "process/runtime/test_rpc_peers.py::test_a_call_for_an_earlier_incarnation_is_refused"
        ),
        says=r"DID NOT RAISE .*ActorNotFound",
    ),
    # The callee of a caller that is stopped works for ever.
    Mutant(
        name="deadline not sent",
        path="runtime/rpc/rpc_connection.py",
        old="timeout_ms = math.ceil(timeout_s * 1000)",
        new="timeout_ms = 0",
        command=_pytest(
            "process/runtime/test_rpc_deadlines.py::test_a_call_carries_the_time_that_connecting_has_left"
        ),
        says=r"assert 0 < 0",
    ),
    # A slow reader no longer slows the writer, and memory fills with items.
    Mutant(
        name="credits granted twice",
        path="runtime/rpc/rpc_client.py",
        old="                num_taken = 0\n            yield item\n",
        new="            yield item\n",
        command=_pytest("process/runtime/test_rpc_streams.py::test_a_slow_reader_slows_the_writer"),
        says=r"assert \(\d+ - \d+\) <= 8",
    ),
)

_RESTART_MUTANTS: Final[Sequence[Mutant]] = (
    # The jobs beside the one that ends its worker then run one at a time, until each has returned.
    Mutant(
        name="quarantine outlives its cause",
        path="runtime/rollout/agents/worker_pool.py",
        old="        del worker.quarantine[1:]\n",
        new="",
        command=_pytest(
            "unit/rollout/test_worker_pool.py::test_once_a_job_is_found_that_ends_its_worker_the_"
            "others_run_side_by_side_again"
        ),
        says=r"TimeoutError",
    ),
    Mutant(
        name="one restart too many",
        path="runtime/actor/actor_spec.py",
        old="if num_recent >= policy.max_restarts:",
        new="if num_recent > policy.max_restarts:",
        command=_BACKOFF,
        says=r"FAILED .*_then_the_tracker_gives_up",
    ),
    Mutant(
        name="backoff not reset",
        path="runtime/actor/actor_spec.py",
        old="2.0 ** min(num_recent, 60)",
        new="2.0 ** min(self.num_restarts - 1, 60)",
        command=_BACKOFF,
        says=r"FAILED .*_backoff_starts_again",
    ),
    # An actor that leaves by itself is neither replaced nor reported.
    Mutant(
        name="exit status 0 taken for success",
        path="runtime/actor/supervised_actor.py",
        old="            if not self.has_run and not self._process.was_killed:\n",
        new=(
            "            if status.code == 0:\n"
            "                break\n"
            "            if not self.has_run and not self._process.was_killed:\n"
        ),
        command=_pytest(
            "process/runtime/test_actor_restarts.py::test_an_end_that_nobody_asked_for_is_reported_"
            "and_the_actor_replaced[exit status 0]"
        ),
        says=r"ActorDied: .* was stopped",
    ),
    # `Popen.poll` gives 0 for a process that somebody else has reaped.
    Mutant(
        name="lost exit status taken for success",
        path="runtime/process/child_process.py",
        old=(
            "            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)\n"
            "            self.status"
        ),
        new="            self.status",
        command=_pytest(
            "process/runtime/test_process.py::test_a_status_that_someone_else_reaped_is_unknown_not_success"
        ),
        says=r"assert ExitStatus\(code=0\) == ExitStatus\(code=None\)",
    ),
)

_SYNC_MUTANTS: Final[Sequence[Mutant]] = (
    # An engine whose checksums are wrong serves the version.
    Mutant(
        name="failed verification ignored",
        path="runtime/pools/sync_state.py",
        old="case (SyncStep.VERIFY, []) | (",
        new="case (SyncStep.VERIFY, _) | (",
        command=_SYNCS,
        says=r"assert \['broken', 'sound'\] == \['sound'\]",
    ),
    # A rank joins a sync whose engines commit already, and is never answered.
    Mutant(
        name="joined too late",
        path="runtime/pools/sync_coordinator.py",
        old="self._current.state.phase >= Phase.COMMITTING:",
        new="self._current.state.phase > Phase.COMMITTING:",
        command=_LATER_RANKS,
        says=r"FAILED .*test_a_rank_that_publishes_while_engines_commit_begins_the_next_sync",
    ),
    # An engine serves a version that it has not read to the end.
    Mutant(
        name="short load committed",
        path="runtime/pools/sync_state.py",
        old="if nbytes == expected_nbytes:",
        new="if nbytes <= expected_nbytes:",
        command=_SYNC_STATE,
        says=r"FAILED .*test_an_engine_that_has_not_loaded_all_bytes_is_discarded",
    ),
    # An engine loads a version whose sync is over.
    Mutant(
        name="late answer taken for a new one",
        path="runtime/pools/sync_state.py",
        old="elif self._engines.get(engine) != step:",
        new="elif engine not in self._engines:",
        command=_SYNC_STATE,
        says=r"FAILED .*test_a_step_that_ends_after_an_abort_changes_nothing",
    ),
    # The engine's KV cache and the memory of a rank do not fit together.
    Mutant(
        name="cache before the ranks have gone",
        path="runtime/pools/sync_state.py",
        old="if are_done and self._released >= self._joined.keys():",
        new="if are_done:",
        command=_SYNC_STATE,
        says=r"FAILED .*test_no_engine_commits_before_all_ranks_are_released",
    ),
    # The other ranks learn it when the lease ends, and not why.
    Mutant(
        name="rank gives up in silence",
        path="runtime/session/weight_publisher.py",
        old="except BaseException as error:",
        new="except UmbraError as error:",
        command=_SYNCS,
        says=r"FAILED .*test_a_rank_that_gives_up_fails_the_others",
    ),
    Mutant(
        name="lease without an end",
        path="runtime/pools/sync_run.py",
        old="self.feed(LeaseExpired(lease.length_s, self._progress_text()))",
        new="pass",
        command=_SYNCS,
        says=r"FAILED .*test_a_rank_that_never_fills_ends_the_sync_by_its_lease",
    ),
)

_DELTA_MUTANTS: Final[Sequence[Mutant]] = (
    # What has changed since another version goes to an image.
    Mutant(
        name="delta to any image",
        path="runtime/weights/links/bucket_deltas.py",
        old="return contents in self._before",
        new="return bool(contents and self._before)",
        command=_DELTAS,
        says=r"FAILED .*test_a_node_that_missed_a_version_gets_all_weights",
    ),
    Mutant(
        name="interrupted sync kept",
        path="runtime/weights/links/bucket_deltas.py",
        old="self._before, self._contents = self._contents, frozenset()",
        new="self._before = self._contents",
        command=_pytest("unit/weights/test_bucket_deltas.py"),
        says=r"FAILED .*test_a_sync_that_does_not_end_leaves_no_base",
    ),
    Mutant(
        name="new image with old contents",
        path="runtime/weights/image/image_memory.py",
        old='self._name, self._nbytes, self._holds = name, nbytes, ""',
        new="self._name, self._nbytes = name, nbytes",
        command=_DELTAS,
        says=r"FAILED .*test_a_lost_image_is_filled_with_all_weights",
    ),
    Mutant(
        name="wrong image trusted",
        path="runtime/weights/links/link_plan.py",
        old="        self.has_lost = True\n",
        new="",
        command=_DELTAS,
        says=r"FAILED .*test_an_image_that_was_found_wrong_gets_no_delta_but_all_weights",
    ),
    Mutant(
        name="delta not refused",
        path="runtime/weights/links/weight_links.py",
        old="if base and base != receiver.holds:",
        new="if base and base == receiver.holds == 0:",
        command=_DELTAS,
        says=r"FAILED .*test_a_delta_to_an_image_with_other_contents_is_refused",
    ),
)

_LEDGER_MUTANTS: Final[Sequence[Mutant]] = (
    Mutant(
        name="wrong checksum accepted",
        path="runtime/rollout/ledger/ledger_frames.py",
        old="return payload if _checksum((payload,), length, start + offset) == checksum else None",
        new="return payload",
        command=_LEDGER,
        says=r"FAILED .*test_a_frame_at_another_offset_is_not_accepted",
    ),
    # The samples of the first step after the checkpoint are never trained on again.
    Mutant(
        name="restored checkpoint keeps a later step",
        path="runtime/rollout/ledger/ledger_state.py",
        old="for step in [step for step in self._leased if step >= event.step]:",
        new="for step in [step for step in self._leased if step > event.step]:",
        command=_LEDGER,
        says=r"FAILED .*test_a_restored_checkpoint_reverts_later_leases",
    ),
    # A job that dies then goes back to a checkpoint whose samples are gone.
    Mutant(
        name="folded before a checkpoint covers it",
        path="runtime/rollout/ledger/ledger_state.py",
        old="        self.versions[version] = step\n        self._advance(step)\n",
        new=(
            "        self.versions[version] = step\n"
            "        self._advance(step)\n"
            "        self._settle(step)\n"
        ),
        command=_LEDGER,
        says=r"FAILED .*_folded_once_covered",
    ),
    Mutant(
        name="sample leased twice",
        path="runtime/rollout/ledger/ledger_state.py",
        old="samples = self._find(event, event.uids, _SCORED)",
        new="samples = self._find(event, event.uids, _SCORED | {SampleState.LEASED})",
        command=_LEDGER,
        says=r"FAILED .*test_the_impossible_is_refused.*is leased, not scored",
    ),
)

_SNAPSHOT: Final = "runtime/rollout/ledger/ledger_snapshot.py"
_STATE: Final = "runtime/rollout/ledger/ledger_state.py"

_SNAPSHOT_MUTANTS: Final[Sequence[Mutant]] = (
    Mutant(
        name="snapshot of discarded steps",
        path=_SNAPSHOT,
        old="return all(step >= self.steps_done for at, step in restores if at >= self.position)",
        new="return True",
        command=_SNAPSHOTS,
        says=r"FAILED .*test_after_a_return_to_a_checkpoint|FAILED .*that_serves_it",
    ),
    Mutant(
        name="return to come not known to a snapshot",
        path=_SNAPSHOT,
        old="own = [] if restoring_step is None else [(history.end, restoring_step)]",
        new="own: Restores = []",
        command=_SNAPSHOTS,
        says=r"FAILED .*that_serves_it",
    ),
    Mutant(
        name="damaged snapshot read",
        path=_SNAPSHOT,
        old="if size < 0 or file.read() != digest.digest():",
        new="if size < 0:",
        command=_SNAPSHOTS,
        says=r"FAILED .*test_a_damaged_snapshot_means_an_older_one",
    ),
    Mutant(
        name="snapshot of another log read",
        path=_SNAPSHOT,
        old="if head != _head(snapshot, history):",
        new="if head[:2] != _head(snapshot, history)[:2]:",
        command=_SNAPSHOTS,
        says=r"FAILED .*test_a_snapshot_of_a_log_that_was_replaced_by_a_backup",
    ),
    # A manager that was stopped has written what its successor does not count.
    Mutant(
        name="snapshot of a fenced writer read",
        path=_SNAPSHOT,
        old="if history.covers(snapshot.position)]\n    return sorted",
        new="if history.parts]\n    return sorted",
        command=_SNAPSHOTS,
        says=r"FAILED .*test_what_a_fenced_manager_wrote_late",
    ),
    Mutant(
        name="snapshot of a checkpoint removed",
        path=_SNAPSHOT,
        old="needed.update([s for s in usable if s.steps_done <= step][:1])",
        new="pass",
        command=_SNAPSHOTS,
        says=r"FAILED .*that_serves_it|FAILED .*none_loses_its_snapshot",
    ),
    # Each crash while one is written leaves a file of its size for the rest of the run.
    Mutant(
        name="half a snapshot stays",
        path=_SNAPSHOT,
        old='history.folder.glob(".*.snapshot.*")',
        new='history.folder.glob(".*.snapshots")',
        command=_SNAPSHOTS,
        says=r"FAILED .*test_a_crash_between_any_two_writes",
    ),
    Mutant(
        name="leases lost in a snapshot",
        path=_STATE,
        old="                if sample.state is SampleState.LEASED:\n",
        new="                if sample.state is SampleState.TRAINED:\n",
        command=_STORY,
        says=r"FAILED .*test_what_is_recorded_is_what_is_there",
    ),
    Mutant(
        name="order of prompts lost in a snapshot",
        path=_STATE,
        old='"num_groups", "_last_order_idx")',
        new='"num_groups")',
        command=_STATES,
        says=r"FAILED .*test_ledger_state",
    ),
    Mutant(
        name="tokens joined over an interruption by others",
        path="runtime/rollout/ledger/token_runs.py",
        old='order = np.argsort(uids, kind="stable")',
        new="order = np.argsort(-np.arange(len(uids)) + 10**9 * uids)",
        command=_STATES,
        says=r"FAILED .*test_ledger_state",
    ),
    Mutant(
        name="run accepted behind missing tokens",
        path="runtime/rollout/ledger/token_runs.py",
        old="and bool((self._lengths[slots] == event.starts).all())",
        new="and bool((self._lengths[slots] <= event.starts).all())",
        command=_STATES,
        says=r"FAILED .*test_the_impossible_is_refused",
    ),
)

_PACKING_MUTANTS: Final[Sequence[Mutant]] = (
    # Completions attend to the prompt of another group.
    Mutant(
        name="prompts exchanged",
        path="trainer/model/packing.py",
        old="of_prompts.first_rows[prompt_of],",
        new="of_prompts.first_rows[sorted(prompt_of)],",
        command=_PACKING,
        says=r"Tensor-likes are not close",
    ),
    Mutant(
        name="tokens of tools trained on",
        path="trainer/model/micro_batches.py",
        old="generated=np.flatnonzero(batch.mask[span])",
        new="generated=np.arange(int(batch.prompt_lens[idx]), span.stop - span.start)",
        command=_PACKING,
        says=r"assert \[7, 8, 9, 10\] == \[7, 10\]",
    ),
    # Right where a rank has all samples of its groups.
    Mutant(
        name="advantages of other samples",
        path="trainer/data/train_batch.py",
        old="of_groups[self.groups.indices]",
        new="of_groups[: len(self.groups.indices)]",
        command=_pytest("unit/trainer/test_advantage_estimators.py"),
        says=r"FAILED .*test_samples_of_a_group_that_ranks_share",
    ),
    # Right where a rank has whole groups only.
    Mutant(
        name="rewards of another sample",
        path="runtime/rollout/manager/batch_answers.py",
        old="(offsets[positions] + np.asarray(indices, np.int64))",
        new="np.arange(len(indices))",
        command=_pytest(
            "unit/rollout/test_batch.py::test_a_sample_brings_the_rewards_of_its_whole_group_"
            "also_where_ranks_share_it"
        ),
        says=r"assert \[0, 1, 2\] == \[0, 2, 4\]",
    ),
    Mutant(
        name="token cap exceeded",
        path="runtime/rollout/manager/batch_plan.py",
        old="+ cost > capacity and bin_items:",
        new="+ cost > _SPLIT_RATIO * capacity and bin_items:",
        command=_pytest(
            "unit/rollout/test_batching.py::test_one_micro_batch_more_rather_than_a_little_beyond_"
            "the_token_cap"
        ),
        says=r"assert \[12\] == \[4, 8\]",
    ),
)

_TRAINER_MUTANTS: Final[Sequence[Mutant]] = (
    # Samples of the newest version count as stale: their prompts have other numbers.
    Mutant(
        name="versions of prompts",
        path="trainer/data/train_batch.py",
        old="(self.mask == 1) & (self.versions != version)",
        new="self.versions != version",
        command=_pytest(
            "unit/trainer/test_packing.py::test_a_sample_is_of_a_version_if_that_generated_all_"
            "its_tokens"
        ),
        says=r"FAILED .*test_a_sample_is_of_a_version",
    ),
    Mutant(
        name="columns of other samples",
        path="trainer/model/micro_batches.py",
        old="members = [members[idx] for idx in order]",
        new="members = sorted(members)",
        command=_pytest(
            "unit/trainer/test_packing.py::test_advantages_and_lengths_follow_their_samples_into_"
            "packing_order"
        ),
        says=r"FAILED .*test_advantages_and_lengths_follow",
    ),
    Mutant(
        name="padding that weighs",
        path="trainer/model/micro_batches.py",
        old="weights=zero,",
        new="weights=torch.ones(1, device=self.device),",
        command=_pytest(
            "unit/trainer/test_packing.py::test_an_empty_micro_batch_is_padding_without_weight"
        ),
        says=r"FAILED .*test_an_empty_micro_batch_is_padding",
    ),
    # The other ranks train on, and wait for rank 0 in the next collective.
    Mutant(
        name="error of rank 0 alone",
        path="trainer/world/mesh.py",
        old="    if outcome[1] is not None:",
        new="    if outcome[1] is not None and mesh.is_lead:",
        command=_pytest(
            "process/trainer/test_distributed_training.py::test_an_error_of_one_rank_is_every_"
            "ranks_error"
        ),
        says=r"FAILED .*test_an_error_of_one_rank",
    ),
    Mutant(
        name="signal of one rank",
        path="trainer/world/mesh.py",
        old="_dist.all_reduce(values, op=_dist.ReduceOp.MAX)",
        new="_dist.all_reduce(values, op=_dist.ReduceOp.MIN)",
        command=_pytest(
            "process/trainer/test_distributed_training.py::test_a_signal_to_one_rank_is_every_"
            "ranks_signal"
        ),
        says=r"FAILED .*test_a_signal_to_one_rank",
    ),
    # A model that scales its logits is trained on others than it generates by.
    Mutant(
        name="logits never compared",
        path="trainer/model/train_model.py",
        old="        if not self._is_compared:",
        new="        if self._is_compared:",
        command=_TRAIN_MODEL,
        says=r"FAILED .*test_a_model_that_changes_its_logits",
    ),
    Mutant(
        name="policy takes the reference's parameters",
        path="trainer/model/train_model.py",
        old="parameter.copy_(other.parameters[name])",
        new="other.parameters[name].copy_(parameter)",
        command=_TRAIN_MODEL,
        says=r"FAILED .*test_a_reference_takes_the_policys",
    ),
    # A checkpoint has tensors of two steps.
    Mutant(
        name="checkpoint of what is trained on",
        path="trainer/checkpoint/checkpoint_store.py",
        old="return super().lookup_object(index) if copy is None else copy",
        new="return super().lookup_object(index)",
        command=_SAVES,
        says=r"FAILED .*test_a_checkpoint_has_the_state_at_its_step",
    ),
    # The ledger forgets what a resume from the checkpoint before needs.
    Mutant(
        name="checkpoint announced too early",
        path="trainer/checkpoint/checkpoint_store.py",
        old="                writer.save(self._group)",
        new="                on_complete()\n                writer.save(self._group)",
        command=_SAVES,
        says=r"FAILED .*test_a_checkpoint_is_announced_when_it_is_complete",
    ),
)

_JOB_MUTANTS: Final[Sequence[Mutant]] = (
    # Engines stay on the GPUs of a job that nobody starts again.
    Mutant(
        name="failure without an end",
        path="runtime/actor/job_rules.py",
        old="is_over = not self.may_restart",
        new="is_over = False",
        command=_JOB_RULES,
        says=r"FAILED .*test_after_a_failure_the_job_continues_if_torchrun",
    ),
    # The nodes that are left cannot connect when they meet again.
    Mutant(
        name="keys of others forgotten",
        path="runtime/actor/job_rules.py",
        old="self._has_lost_node or has_failed",
        new="has_failed",
        command=_JOB_RULES,
        says=r"FAILED .*test_keys_are_kept_for_the_nodes_that_are_left",
    ),
    Mutant(
        name="replicas not compared",
        path="runtime/pools/sync_state.py",
        old="return self._checksums.setdefault((offset, nbytes), checksum) != checksum",
        new="return self._checksums.setdefault((offset, nbytes), checksum) is None",
        command=_SYNC_STATE,
        says=r"FAILED .*test_ranks_whose_replicas_differ_fail_the_sync",
    ),
    Mutant(
        name="end before a revert",
        path="runtime/pools/sync_state.py",
        old="case Phase.COMMITTING if are_done and not self._leaving:",
        new="case Phase.COMMITTING if are_done:",
        command=_SYNC_STATE,
        says=r"FAILED .*test_the_sync_ends_when_an_engine_that_was_cut_off_has_been_reverted",
    ),
)

_ENGINE_MUTANTS: Final[Sequence[Mutant]] = (
    Mutant(
        name="logprob of another request",
        path="engines/vllm/vllm_outputs.py",
        old="row = made.req_id_to_index[output.request_id]",
        new="row = message.outputs.index(output)",
        command=_VLLM_OUTPUTS,
        says=r"FAILED .*test_a_token_has_the_logprob_of_its_row",
    ),
    Mutant(
        name="last token without its logprob",
        path="engines/vllm/vllm_outputs.py",
        old="if output.new_token_ids:",
        new="if output.new_token_ids and output.finish_reason is None:",
        command=_VLLM_OUTPUTS,
        says=r"FAILED .*test_what_was_taken_does_not_come_again_and_the_end_brings",
    ),
    Mutant(
        name="tokens taken twice",
        path="engines/vllm/vllm_outputs.py",
        old="start, self._num_taken = self._num_taken, len(self._tokens)",
        new="start = self._num_taken",
        command=_VLLM_OUTPUTS,
        says=r"FAILED .*test_what_was_taken_does_not_come_again",
    ),
)

UNIT_MUTANTS: Final[Sequence[Mutant]] = (
    *_RPC_MUTANTS,
    *_RESTART_MUTANTS,
    *_SYNC_MUTANTS,
    *_DELTA_MUTANTS,
    *_LEDGER_MUTANTS,
    *_SNAPSHOT_MUTANTS,
    *_PACKING_MUTANTS,
    *_TRAINER_MUTANTS,
    *_JOB_MUTANTS,
    *_ENGINE_MUTANTS,
)

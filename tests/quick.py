"""How many cases of the tests that take long `make test` runs: it is to end in minutes on two
cores.

The other cases are marked slow. `make test-slow` runs all of them before a release, and continuous
integration a sixteenth for each commit.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

# By the test's file and name (* for all of a file): how many of its cases, chosen by a hash of
# their names; or the name of the only one.
KEPT: dict[str, int | str] = {
    "test_attention_calls::test_large_float32_scores_keep_the_contract": 1,
    "test_attention_calls::test_the_flop_counter_counts_attended_pairs": 2,
    "test_attention_experiments::test_the_first_rungs_are_measured_and_the_others_say_why_not": 0,
    "test_attention_paths::test_any_strides_equal_contiguous": 5,
    "test_attention_paths::test_autocast_casts_like_sdpa": 3,
    "test_attention_paths::test_both_ways_give_the_same": 1,
    "test_attention_paths::test_compile_fullgraph_around_the_operator": 1,
    "test_attention_paths::test_forward_mode_is_refused": 2,
    "test_attention_paths::test_gradients_flow_through_the_lse": 3,
    "test_attention_paths::test_k7_hard_values": 2,
    "test_attention_paths::test_lazily_negated_tensors_are_read_with_their_sign": 2,
    "test_attention_paths::test_leading_dimensions": 2,
    "test_attention_paths::test_tma_reads_any_strides_that_it_can": 1,
    "test_attention_paths::test_what_inference_mode_has_made_trains": 1,
    "test_axes::test_a_run_of_chosen_axes_has_a_folder_of_its_own_and_tables_that_tell_sizes_apart": 0,
    "test_block_sparse::test_a_nan_gradient_of_a_row_without_keys_goes_nowhere": 1,
    "test_block_sparse::test_a_tile_of_the_mask_in_several_steps": 2,
    "test_block_sparse::test_a_tile_past_the_end_of_a_head_reads_no_other": "200-block_size0-cpu",
    "test_block_sparse::test_dead_tiles_are_never_read": 1,
    "test_block_sparse::test_masks": 9,
    "test_block_sparse::test_pointers_advanced_inside_the_skip_branch_are_rejected": 1,
    "test_block_sparse::test_rows_without_keys": 3,
    "test_block_sparse::test_staircase_in_one_launch": 1,
    "test_chunked_loss::test_a_wide_block_computes_no_product_of_its_feed_forward_layer_again": 0,
    "test_chunked_loss::test_bfloat16_loses_no_more_than_twice_what_the_plain_loss_does": 1,
    "test_compare::test_groups_without_a_change_alarm_no_more_often_than_stated": 0,
    "test_confined::test_k6_a_bad_document_spoils_no_other": 2,
    "test_confined::test_k6_reaches_no_other_head_and_no_earlier_tile": 3,
    "test_data_parallel_turns::test_a_wrapper_that_is_wrong_or_does_not_fit_is_told_from_the_others": 0,
    "test_data_parallel_turns::test_every_wrapper_takes_its_turns_with_the_host_to_itself": 0,
    "test_documents::test_the_fsdp_script_trains_goes_on_and_exports": 0,
    "test_documents::test_the_script_for_a_long_sequence_trains": 0,
    "test_empty_device::test_a_cell_leaves_no_memory": 6,
    "test_gpu_tests::test_what_makes_no_sense_is_refused": 3,
    "test_graded::test_our_adapters_pass": 16,
    "test_grading::test_a_mutant_of_the_minimal_solution_is_told": 8,
    "test_grading::test_a_wrapper_that_does_nothing_earns_nothing": 1,
    "test_grading::test_a_wrong_solution_loses_what_it_gets_wrong": 3,
    "test_hopper_backward::test_a_masks_last_tile_has_rows_of_its_own_head": 2,
    "test_hopper_backward::test_additions_in_order_end_however_few_multiprocessors_are_free": 1,
    "test_hopper_backward::test_heads_take_turns_where_tiles_differ_in_length": 1,
    "test_hopper_backward::test_no_interleaving_of_dk_and_dv_hangs_or_reads_the_wrong_tile": 2,
    "test_hopper_backward::test_no_interleaving_of_dq_hangs_or_reads_the_wrong_tile": 4,
    "test_hopper_backward::test_no_interleaving_sends_the_wrong_gradients": 6,
    "test_hopper_backward::test_parts_are_joined_where_their_tiles_are": 0,
    "test_hopper_backward::test_parts_of_walks_add_up_to_the_gradients": 0,
    "test_hopper_backward::test_the_launcher_hands_over_the_call": 3,
    "test_hopper_backward::test_the_wide_launcher_hands_over_the_call": 4,
    "test_hopper_backward::test_turns_are_of_programs_that_have_started": 3,
    "test_hopper_backward::test_wide_tiles_add_up_to_the_gradients": 0,
    "test_hopper_reports::test_kernels_compile_and_fit": 0,
    "test_hopper_schedule::test_documents_are_walked_whole_and_the_protocol_ends": 8,
    "test_hopper_schedule::test_each_query_meets_each_key_that_it_sees_once": 4,
    "test_hopper_schedule::test_lists_are_walked_whole_and_the_protocol_ends": 5,
    "test_hopper_schedule::test_parts_are_merged_where_their_rows_are": "full-7",
    "test_hopper_schedule::test_parts_are_walked_whole_and_the_protocol_ends": "d64-64-full-tiles",
    "test_hopper_schedule::test_the_protocol_ends_for_every_short_length": 4,
    "test_hostile_records::test_a_row_of_an_older_release_finds_its_cell": 1,
    "test_hostile_records::test_all_changes_of_a_row_at_once_leave_a_report_of_all_good_rows": 1,
    "test_hostile_records::test_what_cannot_be_placed_changes_nothing": "training_run",
    "test_launch::test_D6_a_failing_rank_ends_the_job_with_its_reason": 1,
    "test_launch::test_a_function_that_new_processes_cannot_import_is_refused": 1,
    "test_launch::test_a_result_that_cannot_be_sent_and_an_exception_without_a_text_are_told": 1,
    "test_launching::test_compiled_kernels_wait_before_they_read_and_can_be_replayed": 0,
    "test_masked_experiments::test_a_cell_reports_all_that_it_promises": 1,
    "test_masked_experiments::test_implementations_of_documents_agree": 2,
    "test_masks::test_a_bool_attn_mask_is_sdpas": 6,
    "test_masks::test_and_or": 0,
    "test_masks::test_built_inside_torch_compile_without_a_graph_break": 0,
    "test_masks::test_dilated_attention_compiles_whole_for_lengths_that_vary": 0,
    "test_masks::test_every_constructor_attends_its_definition": 2,
    "test_masks::test_flex_attention_has_the_same_mask_both_ways": 0,
    "test_masks::test_g8_no_dense_mask_is_made": 0,
    "test_masks::test_shared_keys_equal_their_token_mask": 4,
    "test_new_experiment::*": 0,
    "test_pages::test_each_kind_is_drawn_the_same_each_time": 1,
    "test_profile_command::test_an_attention_call_runs_in_every_mode": 2,
    "test_s3_memory::test_checkpointed_gradients_are_bit_identical": 4,
    "test_s3_memory::test_closed_forms_of_the_handouts_cases": 1,
    "test_s3_memory::test_compiled_blocks_save_what_others_measured": 0,
    "test_s3_memory::test_stored_bytes_grow_as_the_closed_forms_say": 0,
    "test_s3_memory::test_the_simulation_is_the_allocator": 1,
    "test_s3_memory::test_what_compiled_blocks_save_is_counted_while_they_are_compiled": 0,
    "test_s4_attention::test_compiled_stages_meet_the_contract": 0,
    "test_s4_attention::test_contract": 50,
    "test_s4_attention::test_function_forward_and_backward": 4,
    "test_s4_attention::test_gradients_of_enormous_scores_stay_finite": 1,
    "test_s4_attention::test_hard_values": 6,
    "test_s4_attention::test_wrong_arguments_are_named": 12,
    "test_s6_sharding::test_a_single_rank_shards_nothing_and_sends_nothing": 1,
    "test_s7_checkpoint::test_D10_a_checkpoint_of_two_ranks_resumes_the_same_trajectory": 1,
    "test_s7_fsdp::test_D6_ranks_that_part_after_the_first_steps_are_told_where": 1,
    "test_s9_training_step::test_losses_and_gradients_are_those_of_one_process": 1,
    "test_shards::test_a_readers_own_attention_is_checked_and_measured": 0,
    "test_sources::test_a_change_of_what_is_measured_changes_the_hash": 2,
    "test_split::test_any_strides": 0,
    "test_split::test_contract": 3,
    "test_split::test_grouped_heads_attend_like_heads": 1,
    "test_split::test_many_parts_and_scores_of_1e4": 1,
    "test_split::test_rows_are_merged_alone_and_together": 1,
    "test_split::test_the_operator_with_its_gradients": "table-full-cpu",
    "test_tile_choice::test_a_kernel_is_checked_and_timed_alone": 2,
    "test_tile_choice::test_grouped_heads_compile_without_a_gpu": 0,
    "test_tma::test_block_sparse": 0,
    "test_tma::test_dense": 2,
    "test_usage::test_an_empty_text_is_refused_by_name": 30,
    "test_usage::test_bytes_that_are_no_text_are_refused_by_name": 30,
    "test_varlen::test_documents": 5,
    "test_varlen::test_heads_groups_and_dtypes": 1,
    "test_varlen::test_no_number_of_a_neighbour_is_read": 1,
}  # fmt: skip


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark slow what `KEPT` does not keep of `items`; tests of the GPU are not counted, as
    `make test` runs none.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "gpu" not in item.keywords and "slow" not in item.keywords:
            cases[f"{item.path.stem}::{item.name.partition('[')[0]}"].append(item)
    for name, of_test in cases.items():
        kept = KEPT.get(name, KEPT.get(f"{name.partition('::')[0]}::*", len(of_test)))
        by_hash = sorted(of_test, key=lambda item: zlib.crc32(item.name.encode()))
        for number, item in enumerate(by_hash):
            if not item.name.endswith(f"[{kept}]") if isinstance(kept, str) else number >= kept:
                item.add_marker(pytest.mark.slow)

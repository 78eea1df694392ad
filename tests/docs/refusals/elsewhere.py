"""Names the tests that show what a sentence says is refused, where a case would need ranks or another library."""

ALARMS, CHECKPOINTS = "tests/lab/trainer/test_run_alarms.py", "tests/lab/runs/test_hostile_checkpoint.py"
RESUMES, RUN_END = "tests/lab/trainer/test_refused_resumes.py", "tests/lab/trainer/test_run_end.py"
FROZEN, FSDP = "tests/library/distributed/test_frozen.py", "tests/library/distributed/test_fsdp_features.py"
CAST_ONCE, SPLIT_EXPERTS = (
    "tests/library/distributed/test_cast_weights_once.py",
    "tests/library/distributed/test_experts_dispatch.py",
)
TENSOR_PARALLEL, SHIM = "tests/library/distributed/test_tensor_parallel.py", "tests/library/foreign/test_shim.py"
LOAD, HUGGING_FACE = "tests/library/export/test_load.py", "tests/lab/trainer/test_huggingface.py"
COMMANDS = "tests/lab/cli/test_export_import.py"
EXPORT, CALLBACK = "tests/library/export/test_weights.py", "tests/library/foreign/test_float8_callback.py"
MONITOR, CHECK = "tests/library/numerics/test_monitor.py", "tests/library/conversion/test_check.py"
TORCHTITAN, MEMORY = "tests/library/foreign/test_torchtitan.py", "tests/lab/memory/test_compiled.py"
REPORT, RELIABILITY = "tests/lab/report/test_command.py", "tests/lab/integration/test_resume.py"
TRAIN = "tests/lab/integration/test_train_cli.py"
SERVING, FREEZE = "tests/library/conversion/test_serving.py", "tests/library/conversion/test_freeze.py"
OPTIONS, PRIMARY = "tests/library/optim/test_options.py", "tests/library/weights/test_primary.py"
BACKWARD = "tests/library/linear/test_backward.py"
COMFYUI = "tests/library/export/test_comfyui.py"
ELSEWHERE: dict[str, dict[str, str]] = {
    "activations.md": {
        "| a module whose `forward` was replaced on the instance | refused": "tests/library/checkpointing/test_store.py"
        "::test_bad_input_is_refused_in_one_line_and_changes_nothing",
    },
    "commands.md": {
        "| 3 | `quaver train`": f"{TRAIN}::test_a_diverging_run_stops_with_one_line",
        "| 4 | a result cannot be written": f"{REPORT}::test_a_disk_that_is_full "
        "tests/lab/bench/test_command.py::test_a_full_disk_is_one_line_and_exit_code_4",
        "| 5 | `quaver train`": f"{ALARMS}::test_stop_ends_the_run_with_a_checkpoint_and_exit_code_5",
    },
    "configuration.md": {
        "a waiting collective ends the run with an error": f"{RUN_END}::test_a_collective_raises_after_its_timeout",
    },
    "data.md": {
        "SentencePiece models and tiktoken ranks (`tokenizer.model`) are refused": "tests/lab/data/test_data_sources.py"
        "::test_files_that_are_no_tokenizers",
    },
    "diagnosing.md": {
        "raises where one that should be float8 is not": f"{CHECK}"
        "::test_a_linear_whose_weight_was_deleted_is_no_float8",
        "raises where a linear was not native": f"{CHECK}::test_training_may_be_required_to_multiply_natively",
        "status `alarm` and exit code 5": f"{ALARMS}::test_stop_ends_the_run_with_a_checkpoint_and_exit_code_5",
        "a loop that resumes raises no alarm again": "tests/library/numerics/test_watch.py"
        "::test_a_loop_that_resumes_raises_what_an_uninterrupted_one_raises",
    },
    "distributed.md": {
        "FSDP1 refuses it": "tests/library/distributed/test_ddp_fsdp1.py::test_fsdp1_refuses_weights_to_gather",
        "fewer than 4,096 gradients for each rank are refused": "tests/library/distributed/test_float8_gradients.py"
        "::test_what_is_refused",
        "or the style refuses them": f"{TENSOR_PARALLEL}::test_errors_when_a_style_is_applied",
        "The styles refuse experts": f"{TENSOR_PARALLEL}::test_errors_when_a_style_is_applied",
        "A tied weight is refused": "tests/library/conversion/test_convert.py"
        "::test_an_error_leaves_the_model_as_it_was",
        "does not divide by the tensor-parallel ranks is refused": f"{TENSOR_PARALLEL}"
        "::test_errors_when_a_module_is_called",
        "refuses to shard its output along features": f"{TENSOR_PARALLEL}::test_errors_when_a_style_is_applied",
        "the weight of this Float8Linear is sharded": f"{FSDP}::test_what_sharded_models_refuse",
        "is not defined on a Float8Tensor`": f"{TENSOR_PARALLEL}::test_errors_when_a_module_is_called",
        "only Tensors of floating point dtype can": f"{FSDP}"
        "::test_torch_refuses_an_int_reshard_after_forward_for_extended_tensors",
        "Through a tensor of a `state_dict()` it raises": f"{FSDP}"
        "::test_a_write_around_the_parameter_is_an_error_and_not_a_stale_scale",
    },
    "experts.md": {
        "gets an error that says so": "tests/library/foreign/test_experts.py::test_filters_that_know_linears_only"
    },
    "export.md": {
        "It refuses those of several blocks": "tests/library/foreign/test_export_experts.py"
        "::test_what_transformers_does_not_read",
        "ends in an error for 576 rows and in wrong values for 192": "tests/library/foreign/test_export.py"
        "::test_transformers_does_not_dequantize_ragged_fp8",
        'What "frozen" refuses': "tests/library/foreign/test_layouts.py"
        "::test_a_layout_is_frozen_with_its_codes_or_refused",
        "**Refused, with exit code 2 and one line": f"{LOAD}::test_bad_input_is_refused_and_leaves_nothing "
        f"{LOAD}::test_a_bundle_is_compared_with_its_digests {COMMANDS}::test_bad_input_is_one_line "
        f"{EXPORT}::test_what_no_format_holds_is_refused",
        "Refused are encoder-decoders": "tests/library/foreign/test_kv_cache.py"
        "::test_what_cannot_be_measured_or_kept_is_refused",
        "Refused are stacks of experts, and the names of diffusers'": f"{COMFYUI}::test_what_is_refused",
        "It is an error where its layer is marked": f"{COMFYUI}::test_a_bad_file_is_refused",
        "**Refused** are `nvfp4`": f"{COMFYUI}::test_a_bad_file_is_refused {COMFYUI}::test_a_file_becomes_a_file",
        "Exit code 4": f"{COMMANDS}::test_a_full_disk_is_one_line_and_exit_code_4",
        "An expert-parallel model is refused": "tests/library/export/test_experts.py"
        "::test_experts_of_one_rank_are_refused",
    },
    "extending.md": {
        "and the roofline refuse it": "tests/library/test_extending.py::test_each_diff_touches_one_file_a_table",
    },
    "fine-tuning.md": {
        "| a gradient for a frozen weight": f"{FREEZE}::test_a_frozen_weight_presents_a_high_precision_parameter",
        "| freezing after adapters are added": f"{FREEZE}::test_refusals_leave_the_model_as_it_was",
        "| a tied weight": f"{FREEZE}::test_refusals_leave_the_model_as_it_was",
        "| NaN or inf in a weight": f"{FREEZE}::test_refusals_leave_the_model_as_it_was",
        "| a recipe with two weight casts": f"{FREEZE}::test_refusals_leave_the_model_as_it_was",
        "A shard cannot have other scales, and refuses": f"{FROZEN}::test_what_is_refused",
        "| tensor parallelism, expert parallelism, FSDP1, `shard_placement_fn`": f"{FROZEN}::test_what_is_refused "
        f"{SPLIT_EXPERTS}::test_experts_that_cannot_be_split",
        "A refusal is one line": f"{FREEZE}::test_refusals_leave_the_model_as_it_was",
    },
    "from-torchao.md": {
        "is an error of torchao's": "tests/library/foreign/test_torchao_names.py"
        "::test_documented_differences_from_torchao_hold",
    },
    "huggingface.md": {
        "**Refused, with exit code 2": f"{HUGGING_FACE}::test_folders_that_do_not_fit_are_refused_in_one_line "
        f"{HUGGING_FACE}::test_files_that_are_missing_or_damaged_are_refused_in_one_line",
        "Exit code 4": f"{HUGGING_FACE}::test_a_full_disk_leaves_nothing_and_says_so",
    },
    "integrations.md": {
        "Refused are offloads to a disk": "tests/library/foreign/test_quaver_config.py"
        "::test_frozen_weights_are_not_offloaded_and_no_weights_partitioned "
        "tests/library/foreign/test_experts_plan.py::test_what_is_refused",
        "| FSDP2, float8 gather |": "tests/library/foreign/test_accelerate.py::test_bfloat16_parameters",
        "| FSDP2 |": "tests/library/foreign/test_lightning.py::test_a_module_that_is_sharded_already_is_refused",
        "torchao has replaced quaver's linears": f"{SHIM}::test_accelerates_fp8_without_the_shim_is_refused "
        f"{CALLBACK}::test_what_would_train_something_else_is_refused",
        "`Float8Callback` raises": f"{CALLBACK}::test_a_model_that_was_not_converted_is_refused",
        "`save_float8` refuses these weights": "tests/library/foreign/test_conv1d.py"
        "::test_copies_pickles_loads_and_saved_folders_compute_the_same",
        "without the shim below is refused": f"{SHIM}::test_accelerates_fp8_without_the_shim_is_refused",
        "- Refused, in one line": f"{SHIM}::test_what_it_cannot_serve_is_refused_in_one_line",
        "that train are refused in the forward": "tests/library/foreign/test_torchao_configs.py"
        "::test_a_weight_of_torchao_that_trains_is_refused",
        "It refuses a module that `ModelParallelStrategy`": "tests/library/foreign/test_lightning.py"
        "::test_a_module_that_is_sharded_already_is_refused",
        "The converter raises if it converted no linear": f"{TORCHTITAN}::test_the_converter_and_the_override_of_0_3",
        "Delayed and static scaling are refused": f"{TORCHTITAN}::test_the_converter_and_the_override_of_0_3",
        "torchtitan refuses the other order": f"{TORCHTITAN}::test_the_converter_and_the_override_of_0_3",
        "with tensor parallelism is refused": f"{TENSOR_PARALLEL}"
        "::test_a_weight_on_a_mesh_of_two_dimensions_is_refused",
        "and refuses others": "tests/library/experts/test_grouped_mm_method.py::test_an_unknown_signature_is_refused",
    },
    "limitations.md": {
        "- Row-wise delayed or static scaling is refused": "tests/library/recipes/test_config.py"
        "::test_bad_combinations_are_refused_when_a_config_is_made",
        "that cuts blocks of scales is refused": f"{TENSOR_PARALLEL}::test_errors_when_a_style_is_applied",
        "A resume under another recipe is refused": f"{RESUMES}"
        "::test_a_resume_that_is_refused_is_one_line_and_leaves_every_byte",
    },
    "loss-is-nan.md": {
        "quaver: error: tensorwise: step 2": f"{TRAIN}::test_a_diverging_run_stops_with_one_line",
        "with exit code 3": f"{TRAIN}::test_a_diverging_run_stops_with_one_line",
        "exit code 5 at the first alarm": f"{ALARMS}::test_stop_ends_the_run_with_a_checkpoint_and_exit_code_5",
    },
    "memory.md": {
        "is refused with its source line": "tests/lab/memory/test_foreign_models.py"
        "::test_what_values_decide_is_refused_with_its_place_or_estimated",
        "the model is refused, or the estimate": "tests/lab/memory/test_foreign_models.py"
        "::test_what_values_decide_is_refused_with_its_place_or_estimated",
        "and Inductor's memory pools are refused": f"{MEMORY}::test_refused_compile_options_leave_settings_as_before "
        "tests/lab/memory/test_compiled.py::test_several_ranks_need_a_torch_that_shows_gathers",
    },
    "monitor.md": {
        "CUDA graphs": f"{MONITOR}::test_a_sample_in_a_cuda_graph_is_refused",
        "A sink that raises ends the monitor": f"{MONITOR}"
        f"::test_a_sink_that_fails_ends_the_monitor_and_not_the_training {MONITOR}"
        "::test_a_monitor_whose_header_cannot_be_written_leaves_no_probes",
        "What `on_event` of an `AlarmSink` raises ends the step": "tests/library/numerics/test_watch.py"
        "::test_what_a_callback_raises_ends_the_step",
    },
    "numerics.md": {
        "autograd refuses a weight that was changed in between": "tests/library/linear/test_module.py"
        "::test_a_weight_changed_before_backward_is_an_error",
        "`high_precision` refuses the float8 all-gather": f"{BACKWARD}::test_bad_names_and_values "
        f"{BACKWARD}::test_primary_weights_and_a_monitor",
    },
    "optimizer.md": {
        "`exp_avg` in float8 with `exp_avg_sq` in bfloat16 or float32": "tests/library/optim/test_adamw.py"
        "::test_a_spike_in_a_block_leaves_the_steps_of_its_neighbours_bounded",
        "Refused: complex and float16 parameters": f"{OPTIONS}::test_a_bad_option_is_refused_in_one_line "
        f"{OPTIONS}::test_options_of_torch_that_these_lack_are_refused "
        f"{OPTIONS}::test_states_of_another_algorithm_are_refused "
        "tests/library/optim/test_adamw.py::test_states_that_do_not_fit_are_refused",
        "a step inside a CUDA graph": f"{OPTIONS}::test_a_step_in_a_cuda_graph_is_refused",
    },
    "plan.md": {
        "A simulation above 100% of a peak ends in an error": "tests/lab/plan/test_search.py"
        "::test_no_step_is_faster_than_the_peak_of_its_gpu",
    },
    "primary-weights.md": {
        "- A weight of the optimizer that is tied, sharded": f"{PRIMARY}"
        "::test_bad_input_is_refused_and_nothing_is_changed",
        "the next `optimizer.step()` raises": f"{PRIMARY}"
        "::test_a_weight_that_was_replaced_is_an_error_and_not_untrained",
        "is an error at its next all-gather": f"{CAST_ONCE}"
        "::test_a_change_inside_is_an_error_at_the_next_all_gather_or_at_the_exit",
        "and `fully_shard` replace the parameters": "tests/library/distributed/test_primary_weights.py"
        "::test_weights_that_fully_shard_replaced_are_an_error",
    },
    "profiling.md": {
        "`quaver.error_on_slow_path()`, raises a RuntimeError for each": "tests/library/runtime/test_slow_paths.py"
        "::test_an_op_that_dequantizes_a_frozen_weight",
        "`QUAVER_ERROR_ON_SLOW_PATH=1`": "tests/library/runtime/test_slow_paths.py::test_the_environment_variable",
    },
    "reliability.md": {
        "| no file can grow beyond a limit": f"{RELIABILITY}::test_every_reliability_scenario_holds",
        "| one bit of a file flipped": f"{RELIABILITY}::test_every_reliability_scenario_holds",
        "| a bad setting on the command line": f"{RELIABILITY}::test_every_reliability_scenario_holds",
    },
    "scale.md": {
        "refuses `--max-restarts` without `TORCH_DISABLE": "tests/lab/settings/test_parallel_dims.py"
        "::test_the_launchers_environment_is_read_or_refused",
    },
    "scaling.md": {
        "it refuses a history of another length": "tests/library/distributed/test_checkpoint.py"
        "::test_torch_refuses_a_history_of_another_length",
        "and otherwise the calibration raises": "tests/library/distributed/test_delayed.py"
        "::test_siblings_that_are_not_named_are_not_calibrated_with_tensor_parallelism",
    },
    "security.md": {
        "any name or opcode that DCP does not write is refused": f"{CHECKPOINTS}"
        f"::test_a_hostile_metadata_is_one_line_and_is_not_run {CHECKPOINTS}"
        "::test_a_hostile_value_is_one_line_and_is_not_run",
        "Anything else is refused": f"{CHECKPOINTS}::test_edited_metadata_is_one_line {RESUMES}"
        "::test_a_resume_that_is_refused_is_one_line_and_leaves_every_byte",
        "A folder is refused unless it belongs to you": "tests/lab/data/test_data_cache.py"
        "::test_a_folder_of_another_user_is_refused_unless_it_is_read_only",
    },
    "serving.md": {
        "a `module_filter_fn` that admits one is an error": f"{SERVING}::test_heads_and_routers_stay_in_high_precision",
        "refused for a model with such siblings": f"{SERVING}::test_siblings_that_engines_fuse_have_one_scale_there",
        "rules of rows are refused, unless": "tests/library/recipes/test_scale_rules.py"
        "::test_rules_that_an_all_gather_lacks_are_refused",
    },
    "trainer.md": {
        "Another path than the run's is refused": "tests/lab/runs/test_checkpoint.py"
        "::test_a_run_resumes_without_the_weights_that_it_began_from",
        "A second `--resume` of a folder ends with exit code 2": f"{RESUMES}"
        "::test_a_run_holds_its_lock_until_it_has_ended_and_a_second_resume_changes_nothing",
        "| exit code 3; the message names": f"{TRAIN}::test_a_diverging_run_stops_with_one_line",
        "collectives raise": f"{RUN_END}::test_a_collective_raises_after_its_timeout",
        "| a file cannot be written, on any rank": f"{RUN_END}"
        "::test_a_full_disk_or_a_removed_folder_ends_the_run_with_one_line",
    },
    "weights.md": {
        "the scope's exit. A write inside is an error": "tests/library/weights/test_cast_once.py"
        "::test_a_change_inside_is_an_error_at_the_next_use_and_at_the_exit",
        "where their config would quantize a primary or frozen weight in another way": f"{PRIMARY}"
        "::test_codes_of_one_recipe_are_not_those_of_another",
        "a conversion back and another config are errors": "tests/library/weights/test_cast_once.py"
        "::test_a_conversion_inside_the_scope_is_an_error "
        "tests/library/weights/test_cast_once.py::test_another_config_inside_the_scope_is_an_error",
        "so are a collective": f"{FROZEN}::test_what_is_refused",
        "For a gathered weight and inside": f"{FSDP}"
        "::test_a_write_around_the_parameter_is_an_error_and_not_a_stale_scale",
    },
    "what-works-with-what.md": {
        '"no" ends in an error': f"{FREEZE}::test_refusals_leave_the_model_as_it_was "
        f"{PRIMARY}::test_bad_input_is_refused_and_nothing_is_changed "
        f"{TENSOR_PARALLEL}::test_errors_when_a_style_is_applied {SPLIT_EXPERTS}::test_experts_that_cannot_be_split "
        f"{FROZEN}::test_what_is_refused "
        "tests/library/distributed/test_ddp_fsdp1.py::test_fsdp1_refuses_weights_to_gather "
        "tests/library/conversion/test_convert.py::test_an_error_leaves_the_model_as_it_was "
        f"{SERVING}::test_what_is_refused "
        f"{TORCHTITAN}::test_the_converter_and_the_override_of_0_3",
    },
    "design/0001-decisions.md": {
        "Refused: Inductor's code for GPUs": f"{MEMORY}::test_refused_compile_options_leave_settings_as_before",
    },
    "design/0010-primary-weights.md": {
        "because it would be wrong in silence": f"{PRIMARY}"
        "::test_bad_input_is_refused_and_nothing_is_changed tests/library/weights/test_primary.py"
        "::test_the_wrapped_optimizer_is_not_stepped_or_scheduled_by_itself "
        "tests/library/distributed/test_primary_weights.py::test_wrapped_models_are_refused",
    },
    "design/0011-dispatch-of-experts.md": {
        "so that all raise where one froze its experts": f"{SPLIT_EXPERTS}::test_ranks_that_disagree",
        "**Refused:** experts that are no multiple of the ranks": f"{SPLIT_EXPERTS}::test_experts_that_cannot_be_split "
        f"{SPLIT_EXPERTS}::test_ranks_that_disagree",
    },
    "design/0015-config.md": {
        "the check of TOML refuses it": "tests/lab/settings/test_config.py::test_a_wrong_key_or_value_in_toml_is_named"
    },
    "design/0016-data.md": {
        "so a folder of another user is refused": "tests/lab/data/test_data_cache.py"
        "::test_a_folder_of_another_user_is_refused_unless_it_is_read_only",
    },
    "design/0019-hardware-sums.md": {
        "so its name is refused": "tests/library/numerics/test_monitor.py::test_wrong_arguments",
    },
}

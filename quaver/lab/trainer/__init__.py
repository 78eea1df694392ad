"""The reference trainer: quaver.lab.model on real text, in float8, with a bfloat16 baseline to compare with.

Read train.py first: it has the loop. Around it are

    before the loop  run_setup, training_run, process, run_description; dry_run sets up a run that does not train
    a step           trained_model, optimizer, micro_batches, precision_schedule, recipe_change, nonfinite, memory
    the numbers      outputs writes to display, loggers, numerics, float8_scales and profiling; alarms act on them
    after the loop   run_end, with summary and plot
"""

"""Defines flags of `quaver train` with which a step takes milliseconds, and a text to train on."""

TINY = [
    *("--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.hidden_dim=48"),
    *("--training.seq_len=32", "--training.local_batch_size=2", "--training.device=cpu"),
    *("--validation.freq=1000000", "--validation.steps=2", "--metrics.log_freq=1"),
]
TEXT = "to be or not to be, that is the question\n" * 200

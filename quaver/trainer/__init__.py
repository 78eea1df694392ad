"""The reference trainer: a small Llama, real text, float8 beside its bfloat16 twin."""

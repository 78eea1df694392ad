"""The reference trainer: a Llama on real text, in float8, with a bfloat16 baseline to compare with."""

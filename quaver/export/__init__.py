"""Float8 weights for serving and fine-tuning: the formats that transformers, vLLM and SGLang load."""

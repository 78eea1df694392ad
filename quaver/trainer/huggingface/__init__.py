"""Weights of Llama models from Hugging Face, and to it."""

"""Converts Llama models from Hugging Face's files to checkpoints, and back."""

"""Converts Llama models from Hugging Face's files to checkpoints and back, and opens the sources of float8 exports."""

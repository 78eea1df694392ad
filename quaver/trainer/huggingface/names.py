"""The tensors of a Llama by name, which are the same in quaver and in Hugging Face's files."""

import torch

from quaver.trainer.config import Model
from quaver.trainer.model import Llama

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The two that may be tied."""

Shapes = dict[str, tuple[int, ...]]


def all_shapes(model: Model) -> Shapes:
    """Return the shapes in the model's state dict, where a tied weight has both its names."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Llama(model).state_dict().items()}


def file_shapes(model: Model) -> Shapes:
    """Return the shapes in a Hugging Face file, which has each weight once: tied ones as the embedding."""
    shapes = all_shapes(model)
    if model.tie_word_embeddings:
        del shapes[HEAD]
    return shapes


def listed(names: list[str], most: int = 3) -> str:
    """The first few of `names`, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""[model]: the shape of the Llama."""

from dataclasses import dataclass

from quaver.trainer.config.require import require, require_finite, require_positive

BYTE_VOCAB_SIZE = 256
"""Text is read as bytes, so a model needs one token for each value of a byte."""


@dataclass(frozen=True)
class Model:
    """Shape of the Llama 3 style model."""

    vocab_size: int = BYTE_VOCAB_SIZE
    """Number of tokens; text is read as bytes, so at least 256."""
    dim: int = 256
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of transformer blocks."""
    n_heads: int = 4
    """Number of query heads; dim / n_heads is the size of a head."""
    n_kv_heads: int = 2
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads."""
    hidden_dim: int = 768
    """Width inside the feed-forward network."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 500000.0
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool = False
    """Use the token embedding as the output projection too."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
        require_positive("model", self, *sizes)
        require_finite("model", self, "norm_eps", "rope_theta")
        require(self.rope_theta > 0, "model.rope_theta", "positive", self.rope_theta)
        require(
            self.n_heads % self.n_kv_heads == 0,
            "model.n_heads",
            f"a multiple of model.n_kv_heads = {self.n_kv_heads}",
            self.n_heads,
            "each key/value head serves the same number of query heads",
        )
        require(
            self.dim % (2 * self.n_heads) == 0,
            "model.dim",
            f"a multiple of 2 * model.n_heads = {2 * self.n_heads}",
            self.dim,
            "rotary embeddings need heads of one, even size",
        )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_heads

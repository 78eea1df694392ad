"""[model]: the shape of the Llama."""

from dataclasses import dataclass

from quaver.trainer.config.require import require, require_default, require_finite, require_positive


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary embeddings to a longer context; the fields are those of `Model`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class Model:
    """Shape of the Llama 3 style model."""

    vocab_size: int = 256
    """Number of tokens: at least those of data.tokenizer, whose bytes are 256."""
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
    rope_scaling_factor: float = 1.0
    """How much slower the slowest rotary frequencies turn, as in Llama 3.1 (8) and 3.2 (32); 1 scales none."""
    rope_low_freq_factor: float = 1.0
    """Frequencies that turn less often than this in rope_original_max_position positions are slowed by the factor."""
    rope_high_freq_factor: float = 4.0
    """Frequencies that turn more often than this are not slowed, and those between the two by a part of the factor."""
    rope_original_max_position: int = 8192
    """Context length that the model was made for before rope_scaling_factor stretched it."""
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
        self._check_rope_scaling()

    def _check_rope_scaling(self) -> None:
        factors = ("rope_low_freq_factor", "rope_high_freq_factor")
        require_finite("model", self, "rope_scaling_factor", *factors)
        factor, low = self.rope_scaling_factor, self.rope_low_freq_factor
        require(factor >= 1, "model.rope_scaling_factor", "at least 1", factor)
        if factor == 1:
            for name in (*factors, "rope_original_max_position"):
                require_default("model", self, name, "model.rope_scaling_factor is above 1")
        require(low > 0, "model.rope_low_freq_factor", "positive", low)
        require(
            self.rope_high_freq_factor > low,
            "model.rope_high_freq_factor",
            f"above model.rope_low_freq_factor = {low}",
            self.rope_high_freq_factor,
        )
        require_positive("model", self, "rope_original_max_position")

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """The settings that stretch the rotary embeddings; None where nothing does."""
        if self.rope_scaling_factor == 1:
            return None
        return RopeScaling(
            self.rope_scaling_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_max_position,
        )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_heads

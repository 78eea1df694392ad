"""[model]: the shape of the Llama, and of its experts."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic.types import AllowInfNan

from quaver.lab.settings.fields import AtLeast1, FiniteNotNegative, Settings, setting

_Width = Annotated[int, Ge(1), Le(10**6)]
"""The bound keeps sizes in bytes inside 64 bits: with 10^5 experts a weight has 10^17 elements."""


SHAPE_SETTINGS = (
    *("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "n_experts", "n_shared_experts"),
    "tie_word_embeddings",
)
"""The settings that say which weights the model has, and what their rows mean."""


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary embeddings to a longer context. `Model` documents the fields."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class Model(Settings, section="model"):
    """Shape of the Llama 3 style model."""

    vocab_size: Annotated[int, Ge(1), Le(10**8)] = setting(256, "At least the tokens of data.tokenizer.")
    dim: _Width = setting(256, "Width of the residual stream.")
    n_layers: Annotated[int, Ge(1), Le(10_000)] = setting(4, "Transformer blocks.")
    n_heads: AtLeast1 = setting(4, "Query heads, of dim / n_heads each.")
    n_kv_heads: AtLeast1 = setting(2, "Key and value heads, shared by n_heads / n_kv_heads query heads each.")
    hidden_dim: _Width = setting(768, "Width inside the feed-forward network, or inside each expert.")
    n_experts: Annotated[int, Ge(0), Le(10**5)] = setting(
        0, "Experts in place of the feed-forward network, of which a token takes top_k; 0 for none."
    )
    top_k: AtLeast1 = setting(2, "Experts of a token.")
    n_shared_experts: Annotated[int, Ge(0), Le(1000)] = setting(0, "Experts that every token takes besides.")
    norm_eps: FiniteNotNegative = setting(1e-5, "Added to the mean square in RMSNorm.")
    rope_theta: Annotated[float, AllowInfNan(False), Gt(0)] = setting(500000.0, "Base of the rotary frequencies.")
    rope_scaling_factor: Annotated[float, AllowInfNan(False), Ge(1)] = setting(
        1.0, "Divides low rotary frequencies: 8 in Llama 3.1, 32 in 3.2; 1 for none."
    )
    rope_low_freq_factor: Annotated[float, AllowInfNan(False), Gt(0)] = setting(
        1.0, "Frequencies with fewer turns than this in the original context are divided by the factor."
    )
    rope_high_freq_factor: FiniteNotNegative = setting(
        4.0, "Frequencies with more turns are unchanged; those between are interpolated."
    )
    rope_original_max_position: AtLeast1 = setting(8192, "Context length before the scaling.")
    tie_word_embeddings: bool = setting(False, "The token embedding is the output projection too.")

    def check(self) -> None:
        """Raise InputError for heads that do not divide evenly, and for settings that nothing reads."""
        self.require(
            self.n_heads % self.n_kv_heads == 0,
            "n_heads",
            f"a multiple of model.n_kv_heads = {self.n_kv_heads}",
            "each key/value head serves the same number of query heads",
        )
        self.require(
            self.dim % (2 * self.n_heads) == 0,
            "dim",
            f"a multiple of 2 * model.n_heads = {2 * self.n_heads}",
            "rotary embeddings need heads of one, even size",
        )
        if self.n_experts == 0:
            self.require_default("top_k", "n_shared_experts", unless="model.n_experts is above 0")
        else:
            self.require(self.n_experts > 1, "n_experts", "0, or at least 2", "one expert needs no router")
            expected = f"at most model.n_experts = {self.n_experts}"
            self.require(self.top_k <= self.n_experts, "top_k", expected, "a token takes each expert once")
        if self.rope_scaling_factor == 1:
            names = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position")
            self.require_default(*names, unless="model.rope_scaling_factor is above 1")
        low = self.rope_low_freq_factor
        expected = f"above model.rope_low_freq_factor = {low}"
        self.require(self.rope_high_freq_factor > low, "rope_high_freq_factor", expected)

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """The settings that stretch the rotary embeddings, or None if nothing does."""
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

"""A Llama 3 style decoder with the parameter names, rotary convention and logits of Hugging Face's Llama.

Shapes: B sequences of T tokens, D = dim, H query heads and G key/value heads of size E = D / H.

q, k and v receive the same tensor object, and so do gate and up, so that float8 quantizes the shared input once.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.lab.model.functional import embedding, plain_rms_norm, rms_norm, swiglu
from quaver.lab.model.mixture import Mixture
from quaver.lab.settings import Model
from quaver.lab.settings.model import RopeScaling
from quaver.linear.function import get_output_dtype
from quaver.runtime.compile_hints import store_once

INIT_STD = 0.02


def make_rope_tables(
    seq_len: int, head_dim: int, theta: float, device: torch.device, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Return float32 cosines and sines [T, E], which rotate the features i and i + E / 2 together."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(seq_len, device=device, dtype=torch.float32)
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return `frequencies` (float32 [E / 2], radians per position) with the low ones scaled down, as in Llama 3.1.

    A frequency has n turns in the original context. Its share clamp((n - low) / (high - low), 0, 1) stays, and the rest
    is divided by the factor (Grattafiori et al., 2024, and the models' published code).
    """
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * share + frequencies / scaling.factor * (1 - share)


def make_document_mask(documents: Tensor) -> Tensor:
    """Return a bool tensor [B, 1, T, T] that is true where query t attends to key s: causally, inside its document.

    Args:
        documents: int tensor [B, T], equal for all tokens of a row that belong to one document.
    """
    same_document = documents[:, None, :, None] == documents[:, None, None, :]
    return same_document.tril()


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [B, T, H, E] by position in float32; the result has the dtype of `heads`."""
    return _rotate(heads, cos, sin) if torch.compiler.is_compiling() else _Rope.apply(heads, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (first, second), (cos, _), (sin, _) = (tensor.chunk(2, dim=-1) for tensor in (heads, cos[:, None], sin[:, None]))
    # One half at a time, each rounded at once, to keep float32 temporaries small.
    halves = (
        (first * cos).sub_(second * sin).to(heads.dtype),
        (second * cos).add_(first * sin).to(heads.dtype),
    )
    return torch.cat(halves, dim=-1)


class _Rope(torch.autograd.Function):
    """A rotation. Its gradient is the inverse rotation; autograd's own backward has more steps, each rounded."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return apply_rope(grad, cos, -sin), None, None


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` over the last dim."""

    feeds_float8 = False
    """Whether only float8 linears read the result, so that it need not be saved for backward (functional.py)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize `hidden` [..., D]. Under autocast the result has autocast's dtype."""
        out_dtype = get_output_dtype(hidden)
        if self.feeds_float8:
            return rms_norm(hidden, self.weight, self.eps, out_dtype)
        return plain_rms_norm(hidden, self.weight, self.eps).to(out_dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend along T of `hidden` [B, T, D], causally or as `mask` (bool, [B, 1, T, T]) allows."""
        query = apply_rope(self._split_heads(self.q_proj(hidden)), cos, sin).transpose(1, 2)
        key = apply_rope(self._split_heads(self.k_proj(hidden)), cos, sin).transpose(1, 2)
        value = self._split_heads(self.v_proj(hidden)).transpose(1, 2)
        return self.o_proj(self._attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        # CUDA's kernel for masks needs as many key heads as query heads; otherwise torch saves all scores.
        queries_per_key = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(queries_per_key, dim=1) for heads in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


class FeedForward(nn.Module):
    """SwiGLU."""

    feeds_float8 = False
    """Whether down_proj is float8, so that its input need not be saved in high precision."""

    def __init__(self, config: Model, experts: int = 1) -> None:
        """Take `experts`, the number of shared experts of a mixture, which are one wide network."""
        super().__init__()
        hidden_dim = experts * config.hidden_dim
        self.gate_proj = nn.Linear(config.dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, config.dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each token of `hidden` [B, T, D]."""
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        product = swiglu(gate, up) if self.feeds_float8 else F.silu(gate) * up
        return self.down_proj(product)


class Block(nn.Module):
    """Attention, then feed-forward, each on normalized input and added to the residual stream."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        shared_experts = FeedForward(config, config.n_shared_experts) if config.n_shared_experts else None
        self.mlp = Mixture(config, shared_experts) if config.n_experts else FeedForward(config)
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the residual stream [B, T, D] after this block; for `mask` see Attention."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        output = self.mlp(self.post_attention_layernorm(hidden))
        if torch.compiler.is_compiling():
            # Otherwise Inductor adds again in each of five readers. The norm comes before, and so stays recomputable.
            store_once(hidden.detach(), before=output.detach())
        return hidden + output


class Embedding(nn.Embedding):
    """The embedding of tokens, whose gradient is summed in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors [B, T, D] of `input` [B, T] (int64), in the weight's dtype."""
        return embedding(input, self.weight)


class Decoder(nn.Module):
    """Embedding, blocks and the last norm; Hugging Face's name is `model`."""

    residual_dtype: torch.dtype | None = None
    """The dtype of the residual stream; None for the embedding's dtype."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.rope_scaling = config.rope_scaling
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, T, D] of `tokens` [B, T] (int64); for `documents` see Llama.forward."""
        config = self.config
        cos, sin = make_rope_tables(
            tokens.shape[1], config.head_dim, config.rope_theta, tokens.device, self.rope_scaling
        )
        mask = None if documents is None else make_document_mask(documents)
        hidden = self.embed_tokens(tokens)
        hidden = hidden.to(self.residual_dtype or hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, mask)
        return self.norm(hidden)


class Llama(nn.Module):
    """The language model; `initialize` draws its weights.

    Its state_dict has the names of `transformers.LlamaForCausalLM`, or with experts of `Glm4MoeForCausalLM`.
    """

    fuses_producers: bool = False
    """Whether norms and SwiGLUs in front of float8 linears save only their inputs."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's weight with the output projection, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def iter_blocks(self) -> Iterator[Block]:
        """Yield the blocks in order."""
        yield from (layer for layer in self.model.layers if isinstance(layer, Block))

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits [B, T, vocab] of `tokens` [B, T] (int64).

        With `documents` (int, [B, T]: each token's document) attention does not cross documents.
        """
        return self.lm_head(self.model(tokens, documents))


def make_meta_llama(config: Model) -> Llama:
    """Make the model on the meta device, which has shapes and dtypes but no storage."""
    with torch.device("meta"):
        return Llama(config)


class BlockWeight(NamedTuple):
    """A parameter of a block, neither split nor sharded."""

    name: str
    """The last part of the name of its module: a linear's, a norm's, "gate" of the router, or "experts"."""
    shape: tuple[int, ...]
    """[out, in] of a linear or the router, [experts, out, in] of the experts, [dim] of a norm."""


SPLIT_DIMS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
"""The linears of a block, with the dim of their weights that tensor parallelism splits."""


@functools.cache
def list_block_weights(config: Model) -> tuple[BlockWeight, ...]:
    """Return the parameters of one block."""
    with torch.device("meta"):
        parameters = dict(Block(config).named_parameters())
    return tuple(BlockWeight(name.split(".")[-2], tuple(weight.shape)) for name, weight in parameters.items())


def count_expert_elements(config: Model) -> int:
    """Return the number of elements of one routed expert's weights, or 0 without experts."""
    return sum(math.prod(shape[1:]) for _, shape in list_block_weights(config) if len(shape) == 3)


def choose_init_std(name: str, config: Model) -> float:
    """Return a matrix's initial standard deviation; matrices that write to the residual stream shrink with depth."""
    writes_residual = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
    return INIT_STD / (2 * config.n_layers) ** 0.5 if writes_residual else INIT_STD


def count_training_flops_per_token(config: Model, seq_len: int) -> int:
    """Return the FLOPs of forward and backward for one token: 6 per weight that multiplies it, and attention.

    A token takes top_k of the routed experts. All of attention counts, as is usual, although a causal kernel may skip
    half of it.
    """
    matrices = sum(math.prod(shape) for _, shape in list_block_weights(config) if len(shape) == 2)
    weights_per_block = matrices + config.top_k * count_expert_elements(config)
    linear_weights = config.n_layers * weights_per_block + config.dim * config.vocab_size
    return 6 * linear_weights + count_attention_flops_per_token(config, seq_len)


def count_attention_flops_per_token(config: Model, seq_len: int) -> int:
    """Return the FLOPs of attention's matmuls for one token, forward and backward, including masked scores."""
    return 12 * config.n_layers * config.dim * seq_len

"""Rotary embeddings stretched as in Llama 3.1, against transformers; not a bit changes where nothing stretches them."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quaver.trainer.config import Model
from quaver.trainer.huggingface.config import hf_config
from quaver.trainer.model import rope_tables, scaled_frequencies


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)], ids=["llama 3.1 8B", "llama 3.2 1B"])
def test_scaled_frequencies_are_those_of_transformers(factor, head_dim):
    model = Model(dim=head_dim * 4, rope_scaling_factor=factor)
    config = LlamaConfig(**hf_config(model, dtype="float32", kept={"max_position_embeddings": 131072}))
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    assert attention_factor == 1
    plain = model.rope_theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    scaled = scaled_frequencies(plain, model.rope_scaling)
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)
    slowed = plain / scaled
    assert (slowed == 1).any()
    assert (slowed > 0.999 * factor).any()
    assert ((slowed > 1.01) & (slowed < 0.99 * factor)).any()


def test_rope_without_scaling_is_as_it_was():
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(0, 16, 2) / 16)).repeat(1, 2)
    cos, sin = rope_tables(50, 16, 1e4, torch.device("cpu"), Model().rope_scaling)
    assert torch.equal(cos, angles.cos())
    assert torch.equal(sin, angles.sin())
    scaled = rope_tables(50, 16, 1e4, torch.device("cpu"), Model(rope_scaling_factor=8.0).rope_scaling)
    assert not torch.equal(scaled[0], cos)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_low_freq_factor": 2.0}, "its default, 1.0, unless model.rope_scaling_factor is above 1, got 2.0"),
        ({"rope_original_max_position": 64}, "its default, 8192, unless"),
        ({"rope_scaling_factor": 0.5}, "model.rope_scaling_factor must be at least 1, got 0.5"),
        ({"rope_scaling_factor": float("nan")}, "model.rope_scaling_factor must be finite"),
        ({"rope_scaling_factor": 8.0, "rope_low_freq_factor": 0.0}, "model.rope_low_freq_factor must be positive"),
        ({"rope_scaling_factor": 8.0, "rope_high_freq_factor": 1.0}, "must be above model.rope_low_freq_factor = 1.0"),
        ({"rope_scaling_factor": 8.0, "rope_original_max_position": 0}, "rope_original_max_position must be at least"),
    ],
)
def test_rope_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Model(**settings)

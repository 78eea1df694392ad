"""Tests that Float8AdamW, alone and with Float8Muon, resumes bit-identically in other trainers."""

import pytest

from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon, float32_embeddings
from tests.library.foreign.llama import llama
from tests.library.foreign.test_accelerate import save_and_resume
from tests.ranks import run as run_on_ranks
from tests.steps import assert_same
from tests.thinned import at_night


def make_adamw(model):
    return Float8AdamW(float32_embeddings(model), lr=1e-3, weight_decay=0.0)


def make_muon(model):
    matrices = {p for layer in model.model.layers for p in layer.parameters() if p.dim() == 2}
    others = [p for p in model.parameters() if p not in matrices]
    muon = Float8Muon([p for p in model.parameters() if p in matrices], lr=1e-3, adjust_lr_fn="match_rms_adamw")
    return CombinedOptimizer(muon, Float8AdamW(others, lr=1e-3, weight_decay=0.0))


@pytest.mark.parametrize("make_optimizer", [make_adamw, make_muon])
def test_transformers_trainer(tmp_path, make_optimizer):
    from tests.library.foreign.hf_trainer import losses_of, trained

    def run(**options):
        model = llama("tensorwise")
        return trained(tmp_path, model, optimizers=(make_optimizer(model), None), **options)

    whole, resumed = run(save_strategy="steps"), run(resume=tmp_path / "checkpoint-2")
    assert losses_of(resumed)[-2:] == losses_of(whole)[-2:]
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize(
    ("strategy", "state_dict_type", "make_optimizer"),
    [
        ("DDP", None, make_adamw),
        ("FSDP2", "FULL_STATE_DICT", make_adamw),
        *at_night(("FSDP2", "SHARDED_STATE_DICT", make) for make in (make_adamw, make_muon)),
    ],
)
def test_accelerate(tmp_path, strategy, state_dict_type, make_optimizer):
    options = strategy, False, state_dict_type, str(tmp_path), make_optimizer
    for whole, resumed in run_on_ranks(2, save_and_resume, *options):
        assert resumed == whole

"""Float8AdamW, alone and with Float8Muon, in other trainers: a resumed run goes on to the bits of a whole one."""

import pytest

from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon, float32_embeddings
from tests.library.foreign.llama import llama
from tests.library.foreign.test_accelerate import save_and_resume
from tests.ranks import run as run_on_ranks
from tests.steps import assert_same
from tests.thinned import at_night


def optimizer_of(model):
    return Float8AdamW(float32_embeddings(model), lr=1e-3, weight_decay=0.0)


def with_muon(model):
    matrices = {p for layer in model.model.layers for p in layer.parameters() if p.dim() == 2}
    others = [p for p in model.parameters() if p not in matrices]
    muon = Float8Muon([p for p in model.parameters() if p in matrices], lr=1e-3, adjust_lr_fn="match_rms_adamw")
    return CombinedOptimizer(muon, Float8AdamW(others, lr=1e-3, weight_decay=0.0))


@pytest.mark.parametrize("optimizer_of", [optimizer_of, with_muon])
def test_transformers_trainer(tmp_path, optimizer_of):
    from tests.library.foreign.test_transformers_trainer import losses_of, trained

    def run(**options):
        model = llama("tensorwise")
        return trained(tmp_path, model, optimizers=(optimizer_of(model), None), **options)

    whole, resumed = run(save_strategy="steps"), run(resume=tmp_path / "checkpoint-2")
    assert losses_of(resumed)[-2:] == losses_of(whole)[-2:]
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize(
    ("strategy", "state_dict_type", "optimizer_of"),
    [
        ("DDP", None, optimizer_of),
        ("FSDP2", "FULL_STATE_DICT", optimizer_of),
        *at_night(("FSDP2", "SHARDED_STATE_DICT", each) for each in (optimizer_of, with_muon)),
    ],
)
def test_accelerate(tmp_path, strategy, state_dict_type, optimizer_of):
    for whole, resumed in run_on_ranks(
        2, save_and_resume, strategy, False, state_dict_type, str(tmp_path), optimizer_of
    ):
        assert resumed == whole

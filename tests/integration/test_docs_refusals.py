"""What the pages of docs/ call refused, raised or an error is so: each sentence of those in `PAGES` has a case."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from quaver import (
    CastConfig,
    Float8LinearConfig,
    calibrate_float8_static_scales,
    cast_weights_once,
    convert_to_float8_training,
    convert_to_high_precision,
    freeze_to_float8,
    use_float8_primary_weights,
)
from quaver.config import ScalingType

DOCS = Path(__file__).parents[2] / "docs"
WORDS = re.compile(r"\b(refuse[sd]?|raises|(is|are) (an )?errors?)\b", re.IGNORECASE)


def linear():
    return nn.Sequential(nn.Linear(64, 48, bias=False))


def converted(recipe="tensorwise", **changes):
    return convert_to_float8_training(linear(), config=replace(Float8LinearConfig.from_recipe_name(recipe), **changes))


def frozen():
    return freeze_to_float8(linear(), "blockwise")


def primary():
    model = converted()
    return model, use_float8_primary_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))


def forward(model):
    return model(torch.randn(16, 64))


def written_in_the_scope(write):
    model = converted()
    with cast_weights_once(model):
        write(model[0])
        forward(model)


def static():
    config = Float8LinearConfig(cast_config_input=CastConfig(scaling_type=ScalingType.STATIC))
    return convert_to_float8_training(linear(), config=config)


def calibrated_by(*batches):
    with calibrate_float8_static_scales(model := static()):
        for batch in batches:
            model(batch).sum().backward()


def replaced_master():
    model, optimizer = primary()
    model.load_state_dict(linear().state_dict(), assign=True)
    optimizer.step()


def under_another_config():
    model, _ = primary()
    model[0].config = Float8LinearConfig.from_recipe_name("rowwise")
    forward(model)


def converted_again():
    model, _ = primary()
    convert_to_float8_training(convert_to_high_precision(model), config="rowwise")


def converted_in_the_scope():
    with cast_weights_once(model := converted()):
        convert_to_high_precision(model)


def tied():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    freeze_to_float8(model)


def with_adapters():
    model = linear().requires_grad_(False).append(nn.Linear(48, 4))
    freeze_to_float8(model)


def with_nan():
    model = linear()
    model[0].weight.data[1, 2] = torch.nan
    freeze_to_float8(model)


def compiled_with_another_dtype():
    model = converted().requires_grad_(False)
    input = torch.randn(16, 64, requires_grad=True)
    output = torch.compile(model, backend="aot_eager")(input)
    model[0].weight.data = model[0].weight.data.to(torch.int8)
    output.sum().backward()


@torch.no_grad()
def out_of_another_shape():
    torch.mul(torch.ones(3), 2, out=primary()[0][0].weight)


AT_NIGHT = compiled_with_another_dtype, "expected a tensor of"
# A phrase of the page: what it says is refused, and what the error says.
PAGES = {
    "weights.md": {
        "of another shape) is an error": [
            (lambda: frozen()[0].weight.set_(torch.ones(48, 64)), "would change the shape or the memory"),
            (lambda: primary()[0][0].weight.detach().t_(), "would change the shape or the memory"),
            (lambda: primary()[0][0].weight.detach().resize_(2, 2), "would change the shape or the memory"),
            (out_of_another_shape, "expected out= of"),
            (lambda: frozen()[0].weight.view(-1).mul_(2), "this is a view of a frozen float8 weight"),
        ],
        "An assignment to `.data` inside it is an error": [
            (lambda: written_in_the_scope(lambda each: setattr(each.weight, "data", each.weight.data * 2)), "changed"),
        ],
        "the scope's exit. A write inside is an error": [
            (lambda: written_in_the_scope(lambda each: each.weight.detach().mul_(2)), "was changed inside"),
        ],
        "conversion back and another config inside": [
            (converted_in_the_scope, "cannot be converted back inside cast_weights_once"),
            (
                lambda: written_in_the_scope(lambda each: setattr(each, "config", converted("rowwise")[0].config)),
                "config",
            ),
            (under_another_config, "was quantized under another config"),
            (converted_again, "was quantized under another config"),
        ],
        "a dtype that is not high precision is an error": [AT_NIGHT],
    },
    "scaling.md": {
        "A forward before the calibration raises": [
            (lambda: forward(static()), "static scales that were never measured"),
            (calibrated_by, "calibrat"),
            (lambda: calibrated_by(torch.zeros(16, 64)), "had an amax of 0.0"),
            (lambda: calibrated_by(torch.full((16, 64), torch.inf)), "had an amax of inf"),
        ],
    },
    "primary-weights.md": {"the next `optimizer.step()` raises": [(replaced_master, "was replaced after")]},
    "fine-tuning.md": {
        "## What is refused": [
            (lambda: frozen()[0].weight.requires_grad_(), "cannot require a gradient"),
            (with_adapters, "call freeze_to_float8 before adapters"),
            (tied, "is tied to"),
            (with_nan, "holds NaN or inf"),
            (lambda: freeze_to_float8(linear(), "rowwise_with_gw_hp"), "one float8 cast for both"),
            (lambda: freeze_to_float8(linear(), "delayed"), "no delayed or static scaling"),
            (lambda: frozen()[0].weight.t(), "has no views in high precision"),
        ],
    },
}
ELSEWHERE = {
    "extending.md": {"and the roofline refuse it": "tests/unit/test_extending.py"},
    "scaling.md": {"it refuses a history of another length": "tests/distributed/test_delayed.py"},
    "fine-tuning.md": {"A shard cannot have other scales, and refuses": "tests/distributed/test_frozen.py"},
    "weights.md": {
        "so are a collective": "tests/distributed/test_frozen.py",
        "  error: counters": "test_fsdp_features.py",
    },
}
"""Sentences whose case needs ranks or another package."""
NOT_YET = {
    "activations.md", "configuration.md", "data.md", "diagnosing.md", "distributed.md", "experts.md", "export.md",
    "from-torchao.md", "huggingface.md", "integrations.md", "limitations.md", "memory.md", "monitor.md", "numerics.md",
    "optimizer.md", "profiling.md", "reliability.md", "scale.md", "security.md", "trainer.md",
}  # fmt: skip
CASES = [
    pytest.param(page, *case, marks=pytest.mark.nightly if case is AT_NIGHT else ())
    for page, phrases in PAGES.items()
    for cases in phrases.values()
    for case in cases
]


@pytest.mark.parametrize(("page", "refused", "message"), CASES)
def test_what_a_page_refuses_is_refused_in_one_line(page, refused, message):
    with torch.set_grad_enabled(True), pytest.raises((RuntimeError, ValueError), match=message) as caught:
        refused()
    assert len(str(caught.value).splitlines()) == 1


def test_every_sentence_has_a_case():
    for page in sorted(DOCS.glob("*.md")):
        phrases = [*PAGES.get(page.name, {}), *ELSEWHERE.get(page.name, {})]
        text = page.read_text(encoding="utf-8")
        assert [phrase for phrase in phrases if phrase not in text] == []
        lines = [line for line in text.splitlines() if WORDS.search(line)]
        if page.name in NOT_YET or page.name == "log.md":
            continue
        assert [line for line in lines if not any(phrase in line or line in phrase for phrase in phrases)] == []

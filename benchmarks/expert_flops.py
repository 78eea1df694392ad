"""The share of the FLOPs of mixtures of experts that runs in float8, with their linears alone and with their experts.

    python -m benchmarks.expert_flops --update-docs     writes the table into docs/experts.md

Builds models of transformers with published sizes on the meta device, converts them, and reads the report. No weights
are needed, and nothing is timed.
"""

import argparse
import logging
import warnings
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.record import ROOT, make_markdown_table, show_tables
from quaver import conversion_report
from quaver.integrations.transformers import prepare_model_for_float8

DOCS = ROOT / "docs" / "experts.md"
RECIPE = "rowwise"
QWEN3 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral 8x7B": ("Mixtral", {}),
    "OLMoE 1B-7B": ("Olmoe", {"intermediate_size": 1024}),
    "Qwen3-30B-A3B": ("Qwen3Moe", QWEN3),
    "GLM-4.5-Air": ("Glm4Moe", {}),
    "gpt-oss-120b": ("GptOss", {}),
    "DeepSeek-V3": ("DeepseekV3", {}),
}
"""The family in transformers, and the fields that differ from the defaults of its config."""


def compute_float8_share(name: str, *, experts: bool) -> tuple[int, float]:
    """Return the number of parameters of a model, and the share of its FLOPs in float8."""
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    prepare_model_for_float8(
        model, RECIPE, module_filter_fn=lambda module, name: experts or isinstance(module, nn.Linear)
    )
    return sum(parameter.numel() for parameter in model.parameters()), conversion_report(model).float8_flops_fraction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update-docs", action="store_true", help="rewrite the table of the page")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "nothing to convert")
    logging.disable(logging.WARNING)
    rows = []
    for name in MODELS:
        parameters, linears = compute_float8_share(name, experts=False)
        rows.append(
            [name, f"{parameters / 1e9:.1f}", f"{linears:.1%}", f"{compute_float8_share(name, experts=True)[1]:.1%}"]
        )
    head = ["model", "parameters, billions", "FLOPs in float8, linears alone", "with experts"]
    show_tables({"expert flops": make_markdown_table(head, rows)}, DOCS, update=options.update_docs)


if __name__ == "__main__":
    main()

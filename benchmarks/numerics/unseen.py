"""An independent test of the alarm rules, with runs and faults that were fixed before the first of them ran.

    python -m benchmarks.numerics.unseen --update-docs              a quarter of an hour; writes
                                                                    benchmarks/results/numerics{_unseen.json,.md}
    python -m benchmarks.numerics.unseen --recorded --update-docs   the page again, from the recorded runs
    python -m benchmarks.numerics.unseen --only "one head"          runs with this in the name, to the terminal

Models, optimizers and loops differ from those of faults.py: transformers' architectures train in plain PyTorch
loops on the bytes of Python's library. A fault counts as named if the first alarm after it names one of its `layers`,
by any rule. `invisible`, also fixed before the runs, says why no number of a matmul would change.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.numerics import inject
from benchmarks.numerics.faults import (
    PAGE,
    RecordingSink,
    describe_exceptions,
    format_event,
    make_grouped_table,
    make_record_path,
    parse_options,
    replay,
    shorten,
)
from benchmarks.numerics.loops import (
    Training,
    TrainingFactory,
    calibrate,
    calibrate_static_scales,
    make_muon,
    make_regression,
    make_sgd,
    make_training,
    make_undecayed_adamw,
)
from benchmarks.record import ROOT, describe_provenance, record_and_show
from quaver.numerics.monitoring import Monitor
from quaver.optim import Float8AdamW

RECORD = ROOT / "benchmarks" / "results" / "numerics_unseen.json"
FAULT_STEP = 31
"""The first step of a fault."""


@dataclass(frozen=True)
class Run:
    """A run, with a fault from `FAULT_STEP` on if `break_it` is given. A fault without it exists from the beginning."""

    name: str
    make: TrainingFactory
    steps: int = 50
    every: int = 2
    break_it: Callable[[Training, ExitStack], Any] | None = None
    layers: tuple[str, ...] = ()
    """The first alarm must name a layer that contains one of these. Empty for a fault that is not in one layer."""
    invisible: str = ""
    """Why no statistic of a matmul can show the fault; empty if one can."""


HEALTHY = (
    Run("Qwen3, rowwise", make_training("qwen3", "rowwise", seed=101)),
    Run("Gemma 2, tensorwise, soft caps", make_training("gemma2", "tensorwise", seed=102)),
    Run("OPT (learned positions, biases, dropout), blockwise", make_training("opt", "blockwise", seed=103)),
    Run("GPT-NeoX (parallel residual), rowwise_with_gw_hp", make_training("neox", "rowwise_with_gw_hp", seed=104)),
    Run("Qwen3, delayed, learning rate 3e-3", make_training("qwen3", "delayed", seed=105, lr=3e-3)),
    Run(
        "OPT, SGD with momentum, learning rate 0.1",
        make_training("opt", "rowwise", seed=106, lr=0.1, optimizer=make_sgd),
    ),
    Run(
        "Llama, Muon, learning rate 0.02", make_training("llama", "tensorwise", seed=107, lr=0.02, optimizer=make_muon)
    ),
    Run("Llama, Float8AdamW", make_training("llama", "rowwise", seed=108, optimizer=Float8AdamW)),
    Run(
        "GPT-NeoX, weight decay 0, warm-up of 1000 steps",
        make_training("neox", "tensorwise", seed=109, warmup=1000, optimizer=make_undecayed_adamw),
        steps=60,
    ),
    Run("Qwen3, LoRA, blockwise", make_training("qwen3", "blockwise", seed=110, lora=True, pretrained=30)),
    Run("Gemma 2, fine-tuning after 60 steps", make_training("gemma2", "mxfp8", seed=111, pretrained=60, lr=1e-4)),
    Run("Llama, primary weights", make_training("llama", "tensorwise", seed=112, primary=True)),
    Run("Qwen3, static scales", make_training("qwen3", calibrate_static_scales(), seed=113, prepare=calibrate)),
    Run(
        "OPT, accumulation of 4, each step",
        make_training("opt", "mxfp8", seed=114, accumulation=4, batch_shape=(2, 64)),
        every=1,
        steps=25,
    ),
    Run(
        "Llama, width 256",
        make_training("llama", "rowwise", seed=115, model_options={"width": 256, "layers": 2}),
        steps=40,
    ),
    Run("Llama, 16 sequences of 32", make_training("llama", "tensorwise", seed=116, batch_shape=(16, 32))),
    Run(
        "Qwen3, 1 sequence of 128, no warm-up",
        make_training("qwen3", "tensorwise", seed=117, batch_shape=(1, 128), warmup=0),
    ),
    Run(
        "GPT-NeoX, bfloat16 weights, every 5th of 150",
        make_training("neox", "rowwise", seed=118, model_options={"dtype": torch.bfloat16}),
        150,
        5,
    ),
    Run(
        "Llama, 8 layers, no clipping",
        make_training("llama", "delayed", seed=119, model_options={"layers": 8}, clip=None),
        steps=40,
    ),
    Run(
        "Llama, tied embeddings, weights cast once",
        make_training(seed=120, once=True, model_options={"tie_word_embeddings": True}),
    ),
    Run("MLP that learns another, Adam", make_regression(121)),
    Run("OPT, dropout 0.3", make_training("opt", "tensorwise", seed=122, model_options={"dropout": 0.3})),
)


TrainingFault = Callable[[Training, ExitStack], Any]


def inject_into_weight(name: str, change: inject.Change) -> TrainingFault:
    return lambda run, stack: inject.change_weight(run.model.get_submodule(name), change)


def change_part(index: Any, value: float) -> inject.Change:
    def change(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return change


def inject_into_operand(name: str, how: Callable[..., None], change: inject.OnOperand) -> TrainingFault:
    return lambda run, stack: how(stack, run.model.get_submodule(name), change)


def inject_into_output(name: str, change: inject.Change) -> TrainingFault:
    """Change the output of a module."""
    return lambda run, stack: inject.change_output(stack, run.model.get_submodule(name), change)


def zero_head(run: Training, stack: ExitStack) -> None:
    """Zero the rows of head 1 in q, k and v, and its columns in o."""
    attention = run.decoder.layers[1].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        inject.change_weight(projection, change_part(slice(16, 32), 0.0))
    inject.change_weight(attention.o_proj, change_part((slice(None), slice(16, 32)), 0.0))


def remove_mask(run: Training, stack: ExitStack) -> None:
    for layer in run.decoder.layers:
        forward = layer.self_attn.forward

        def forward_without_mask(*args: Any, forward: Any = forward, **options: Any) -> Any:
            options["attention_mask"] = None
            return forward(*args, **options)

        inject.patch(stack, layer.self_attn, "forward", forward_without_mask)


def repeat_token(run: Training, stack: ExitStack) -> None:
    batch = run.batch
    run.batch = lambda number: torch.full_like(batch(number), 251)


def drop_activations(run: Training, stack: ExitStack) -> None:
    for index in range(4):
        inject_into_output(f"model.layers.{index}.mlp", lambda out: nn.functional.dropout(out, 0.9))(run, stack)


def raise_decay(run: Training, stack: ExitStack) -> None:
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 100.0


def multiply_loss(run: Training, stack: ExitStack) -> None:
    """Multiply the loss of one batch by 1e4, without clipping."""
    compute_loss, calls = run.compute_loss, iter([1e4])
    run.clip = None
    run.compute_loss = lambda tokens: compute_loss(tokens) * next(calls, 1.0)


def untie_head(run: Training, stack: ExitStack) -> None:
    head = run.model.get_submodule("lm_head")
    head.weight = nn.Parameter(head.weight.detach().clone())


def forget_squares(run: Training, stack: ExitStack) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].zero_()


def forget_all(run: Training, stack: ExitStack) -> None:
    run.optimizer.state.clear()


def duplicate(run: Training, stack: ExitStack) -> None:
    run.decoder.layers[2].load_state_dict(run.decoder.layers[1].state_dict())


def read_other_format(operand: Any, hp: Tensor) -> Any:
    """Read codes of e4m3fnuz, whose exponent has another bias, as e4m3fn."""
    codes = operand.data.float().clamp(-240, 240).to(torch.float8_e4m3fnuz).view(torch.uint8)
    return operand._replace(data=codes.view(torch.float8_e4m3fn))


def change_theta(run: Training, stack: ExitStack) -> None:
    rotary = run.decoder.rotary_emb
    rotary.inv_freq.copy_(10.0 ** (torch.log10(rotary.inv_freq) / 4))


def corrupt_state(run: Training, stack: ExitStack) -> None:
    weight = run.model.get_submodule("model.layers.2.mlp.up_proj").get_parameter("weight")
    run.optimizer.state[weight]["exp_avg"][0, 0] = torch.nan


def keep_gradients(run: Training, stack: ExitStack) -> None:
    run.zeroes_gradients = False


def set_identity_labels(run: Training, stack: ExitStack) -> None:
    """Make each token its own target."""

    def compute_loss(tokens: Tensor) -> Tensor:
        logits = run.model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    run.compute_loss = compute_loss


def ascend(run: Training, stack: ExitStack) -> None:
    compute_loss = run.compute_loss
    run.compute_loss = lambda tokens: -compute_loss(tokens)


def multiply_norm_gain(name: str, factor: float) -> TrainingFault:
    def change(run: Training, stack: ExitStack) -> None:
        with torch.no_grad():
            run.model.get_submodule(name).get_parameter("weight").mul_(factor)

    return change


def raise_epsilon(run: Training, stack: ExitStack) -> None:
    for group in run.optimizer.param_groups:
        group["eps"] = 1.0


def freeze_gate(run: Training, stack: ExitStack) -> None:
    """Fix a gate at -30, where SiLU is almost 0."""
    inject_into_output("model.layers.2.mlp.gate_proj", lambda out: torch.full_like(out, -30.0))(run, stack)


BASE, DOWN, UP, O = (
    make_training(seed=201),
    *(f"model.layers.{name}" for name in ("1.mlp.down_proj", "2.mlp.up_proj", "1.self_attn.o_proj")),
)

FAULTS = (
    Run("one head's weights are zero", BASE, break_it=zero_head, layers=("layers.1.self_attn",)),
    Run(
        "a square weight transposed",
        BASE,
        break_it=inject_into_weight(O, lambda weight: weight.t().contiguous()),
        layers=("layers.1.self_attn",),
        invisible="the same elements",
    ),
    Run(
        "16 x 16 elements of a weight are zero",
        BASE,
        break_it=inject_into_weight(DOWN, change_part((slice(0, 16), slice(0, 16)), 0.0)),
        layers=("layers.1.mlp",),
    ),
    Run(
        "a whole weight is 1",
        BASE,
        break_it=inject_into_weight(DOWN, lambda weight: torch.ones_like(weight)),
        layers=("layers.1.mlp",),
    ),
    Run(
        "a LayerNorm's gain x 100",
        BASE,
        break_it=multiply_norm_gain("model.layers.1.post_attention_layernorm", 100),
        layers=("layers.1.mlp",),
    ),
    Run(
        "attention logits x 64: gain of q's norm",
        make_training("qwen3", seed=202),
        break_it=multiply_norm_gain("model.layers.1.self_attn.q_norm", 64),
        layers=("layers.1.self_attn", "layers.0"),
    ),
    Run(
        "bfloat16 weights stuck: lr 1e-7",
        make_training(seed=203, model_options={"dtype": torch.bfloat16}, lr=1e-7),
    ),
    Run("the attention mask is gone", BASE, break_it=remove_mask, invisible="right matmuls, of other tokens"),
    Run("all tokens are one that is rare", BASE, break_it=repeat_token),
    Run("dropout of 0.9 in each MLP", BASE, break_it=drop_activations),
    Run("weight decay 100", BASE, break_it=raise_decay),
    Run(
        "a spike without clipping, SGD",
        make_training("opt", seed=204, lr=0.1, optimizer=make_sgd),
        break_it=multiply_loss,
    ),
    Run(
        "tied embeddings come apart",
        make_training(seed=205, model_options={"tie_word_embeddings": True}),
        break_it=untie_head,
        invisible="equal weights at first",
    ),
    Run("Adam's second moment is zeroed", BASE, break_it=forget_squares),
    Run(
        "all states of the optimizer are zeroed",
        BASE,
        break_it=forget_all,
        invisible="Adam's first step again, of the usual size",
    ),
    Run(
        "a block gets its neighbour's weights",
        BASE,
        break_it=duplicate,
        layers=("layers.2", "layers.1"),
        invisible="weights as usual",
    ),
    Run(
        "dequant scale of a gradient x 2^6",
        BASE,
        break_it=inject_into_operand(UP, inject.change_grad_operand, inject.scale_dequant_scale(64.0)),
        layers=("layers.2.mlp",),
    ),
    Run(
        "dequant scale of a gradient x 2^-6",
        BASE,
        break_it=inject_into_operand(UP, inject.change_grad_operand, inject.scale_dequant_scale(1 / 64)),
        layers=("layers.2.mlp",),
    ),
    Run(
        "quant and dequant scale of a gradient off by 2^-6",
        BASE,
        break_it=inject_into_operand(UP, inject.change_grad_operand, inject.scale_quant_scale(2.0**-6)),
        layers=("layers.2.mlp",),
        invisible="e5m2 has that range to spare: no harm",
    ),
    Run(
        "codes of e4m3fnuz read as e4m3fn",
        BASE,
        break_it=inject_into_operand(DOWN, inject.change_input_operand, read_other_format),
        layers=("layers.1.mlp.down_proj",),
    ),
    Run("RoPE's theta 10,000 becomes 10", BASE, break_it=change_theta, invisible="a rotation keeps magnitudes"),
    Run("NaN in the optimizer's state", BASE, break_it=corrupt_state, layers=("layers.2.mlp.up_proj",)),
    Run(
        "gradients are not zeroed",
        BASE,
        break_it=keep_gradients,
        invisible="matmuls are those of one step",
    ),
    Run("labels are not shifted", BASE, break_it=set_identity_labels, invisible="right matmuls"),
    Run("the sign of the loss is wrong", BASE, break_it=ascend),
    Run("eps of Adam is 1", BASE, break_it=raise_epsilon, invisible="weights hardly move"),
    Run("a gate is stuck at zero", BASE, break_it=freeze_gate, layers=("layers.2.mlp",)),
    Run(
        "an MLP's output x 1000",
        BASE,
        break_it=inject_into_output("model.layers.1.mlp", lambda out: out * 1000),
        layers=("layers.1", "layers.2"),
    ),
    Run(
        "a gradient's row is infinite, float16-like",
        BASE,
        break_it=lambda run, stack: inject.change_grad_output(
            stack, run.model.get_submodule(UP), lambda grad: grad.index_fill(1, torch.tensor([3]), torch.inf)
        ),
        layers=("layers.2.mlp.up_proj",),
    ),
)


def run_monitored(scenario: Run, records: Path | None) -> tuple[RecordingSink, list[float]]:
    """Run a scenario, and return its samples and three losses: before the fault, at its first step, and at the end."""
    sink = RecordingSink(make_record_path(scenario, records) if records else None)
    with ExitStack() as stack:
        run = scenario.make()
        with Monitor(run.model, every=scenario.every, sink=sink):
            for step in range(1, scenario.steps + 1):
                if step == FAULT_STEP and scenario.break_it is not None:
                    scenario.break_it(run, stack)
                run.step(step)
    return sink, [
        round(run.losses[index], 4)
        for index in (min(FAULT_STEP, scenario.steps) - 2, min(FAULT_STEP, scenario.steps) - 1, -1)
    ]


def judge(scenario: Run, sink: RecordingSink, losses: list[float]) -> dict[str, Any]:
    first = FAULT_STEP if scenario.break_it else 1
    raised = [alarm for alarm in sink.raised if alarm.step >= first]
    steps = [step for step in sink.samples if step >= first]
    named = bool(raised) and (not scenario.layers or any(part in raised[0].layer for part in scenario.layers))
    return {
        "run": scenario.name,
        "samples": len(sink.samples),
        "before": [shorten(alarm) for alarm in sink.raised if alarm.step < first],
        "alarms": [shorten(alarm) for alarm in raised],
        "named": named,
        "after": steps.index(raised[0].step) + 1 if raised else None,
        "losses": losses,
        "invisible": scenario.invisible,
    }


def make_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the table of results/numerics.md by name."""
    visible = [fault for fault in results["faults"] if not fault["invisible"]]
    quiet = [run for run in results["healthy"] if not run["alarms"]]
    outcomes = make_grouped_table("outcome | faults", map(_describe_outcome, results["faults"]))
    counts = (
        f"Of {len(results['faults'])} faults, {len(visible)} change the numbers of matmuls; "
        f"{sum(fault['named'] for fault in visible)} of these were named. "
        f"{len(quiet)} of {len(results['healthy'])} healthy runs raised no alarm"
    )
    return {"unseen": f"{outcomes}\n\n{counts}{describe_exceptions(results['healthy'])}"}


def _describe_outcome(result: dict[str, Any]) -> tuple[str, str]:
    if result["alarms"]:
        rule, after = result["alarms"][0]["rule"], result["after"]
        return "named first" if result["named"] else "another layer", f"{result['run']} (`{rule}`, {after})"
    if result["invisible"]:
        return "cannot be seen", f"{result['run']} ({result['invisible']})"
    return "**missed**", result["run"]


def choose_runs(runs: tuple[Run, ...], part: str) -> Iterator[Run]:
    yield from (run for run in runs if part in run.name)


def run_scenarios(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {**describe_provenance("numerics.unseen"), "healthy": [], "faults": []}
    before = json.loads(RECORD.read_text()) if options.replay else results
    losses = {result["run"]: result["losses"] for result in (*before["healthy"], *before["faults"])}
    for kind, runs in (("healthy", HEALTHY), ("faults", FAULTS)):
        for scenario in choose_runs(runs, options.only):
            if options.replay:
                sink, run_losses = replay(scenario, options.replay), losses[scenario.name]
            else:
                sink, run_losses = run_monitored(scenario, options.records)
            results[kind].append(judge(scenario, sink, run_losses))
            lines = (f"\n    {format_event(event)}" for event in sink.events)
            print(scenario.name, *lines, run_losses, file=sys.stderr, flush=True)
    return results


def main() -> None:
    options = parse_options(__doc__)
    record_and_show(options, lambda: run_scenarios(options), RECORD, make_tables, PAGE)


if __name__ == "__main__":
    main()

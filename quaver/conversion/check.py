"""`assert_float8_training`: checks that float8 is on and that the optimizer trains the float8 weights."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from quaver.conversion.high_precision import iter_float8_modules
from quaver.conversion.idle_modules import explain_missing_weight, explain_replaced_forward, find_idle_modules
from quaver.conversion.report import (
    HIGH_PRECISION_REASON,
    NOT_CONVERTED_REASON,
    conversion_report,
    explain_dtype,
    is_in_high_precision,
    iter_unfinished_reasons,
)
from quaver.foreign.torchao import explain_inference_only
from quaver.linear.float8_module import Float8Module
from quaver.linear.last_run import describe_last_backends, find_traces, get_last_device, may_have_run
from quaver.linear.module import Float8Linear
from quaver.linear.scale_state import LinearScaleSlots
from quaver.runtime.errors import check_is_module
from quaver.runtime.module_names import format_module_name, join_names
from quaver.runtime.slow_paths import list_slow_paths

logger = logging.getLogger(__name__)


def assert_float8_training(
    model: nn.Module, optimizer: Optimizer | None = None, *, allow_frozen: bool = False, require_native: bool = False
) -> None:
    """Raise RuntimeError unless `model` trains in float8 as it was converted.

    Call it when model and optimizer are complete, after all wrappers (DDP, `fully_shard`, PEFT) were applied. Call it
    again after a step, before `zero_grad`: only then does it find float8 linears that nothing calls, and
    `require_native` what ran.

    Args:
        model: the model that trains, or a wrapper around it.
        optimizer: its optimizer; None to check the model alone.
        allow_frozen: whether float8 linears may have weights without gradients, as under LoRA. Some parameter of the
            model must still require a gradient.
        require_native: whether all float8 linears and experts must have multiplied on float8 units in their last
            forward, eager or compiled. A CPU has no float8 units and multiplies exactly.
    Raises:
        TypeError: `model` is no nn.Module, or `optimizer` no optimizer.
        RuntimeError: the model does not train as it was converted. The message has a line for each of these problems:

            - No linear is in float8, or torchao converted some.
            - The conversion of a float8 linear or experts is unfinished.
            - The config of a layer computes all its matmuls in high precision.
            - The weight of a layer was deleted, requires no gradient or is not in the optimizer.
            - A layer did not run while others trained or its parameters got gradients, or has not run since its
              forward was replaced.
            - The optimizer holds a parameter twice, or parameters of another model.
            - Weights changed between forwards without a sync of the delayed scales. This is not checked for weights
              that FSDP2 gathers.
            - With `require_native`, a layer multiplied exactly in its last forward, or has not run.

    A replaced forward may call the original, and an optimizer's state may have been loaded. Before a step this is
    unknown, so it is only logged, at WARNING. Of compiled code only the backends are checked.
    """
    check_is_module(model, argument="model")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    problems = [*_iter_model_problems(model, allow_frozen)]
    if require_native:
        problems += _iter_backend_problems(model)
    if optimizer is not None:
        problems += _iter_optimizer_problems(model, optimizer)
    if problems:
        raise RuntimeError("the model does not train in float8 as asked:\n" + "\n".join(f"  {p}" for p in problems))


def is_torchao_linear(module: nn.Module) -> bool:
    """Return whether torchao converted `module`, a linear."""
    return any(cls.__module__ == "torchao.float8.float8_linear" for cls in type(module).__mro__)


def _iter_model_problems(model: nn.Module, allow_frozen: bool) -> Iterator[str]:
    by_torchao = [name for name, module in model.named_modules() if is_torchao_linear(module)]
    if by_torchao:
        yield (
            f"torchao has converted {join_names(by_torchao)}, as Accelerate's mixed_precision=fp8 does: set it to "
            "bf16, or call quaver.integrations.torchao.install() first and leave the conversion to Accelerate"
        )
        return
    report = conversion_report(model)
    in_high_precision = [name for name, module in iter_float8_modules(model) if is_in_high_precision(module)]
    if not any(iter_float8_modules(model)):
        if any(layer.reason == NOT_CONVERTED_REASON for layer in report.layers):
            yield (
                "no linear is in float8: call convert_to_float8_training (prepare_model_for_float8 for transformers) "
                "before the optimizer is made"
            )
        else:
            yield f"no linear is in float8 ({report.explain_no_conversion()})"
        return
    yield from _iter_run_problems(model)
    if in_high_precision:
        yield (
            f"{join_names(in_high_precision)}: {HIGH_PRECISION_REASON}; call set_high_precision_matmuls(model, []) "
            "to turn float8 on, or convert_to_high_precision on the layer if it should stay so"
        )
    for name, module in iter_float8_modules(model):
        inference_only = explain_inference_only(getattr(module, "weight", None))
        for obstacle in filter(None, [inference_only, explain_dtype(module), *iter_unfinished_reasons(module)]):
            yield f"{format_module_name(name)}: {obstacle}"
    linear_slots = [getattr(module, "scale_slots", None) for _, module in iter_float8_modules(model)]
    if any(
        isinstance(slots, LinearScaleSlots) and slots.conversion_slots.forwards.is_sync_forgotten
        for slots in linear_slots
    ):
        yield (
            "weights changed between forwards without a sync, so delayed scales are out of date: call "
            "sync_float8_amax_and_scale_history(model) once a step, after the backward"
        )
    weights = [named for name, module in iter_float8_modules(model) for named in _list_weights(name, module)]
    frozen = [name for name, weight in weights if not weight.requires_grad]
    if frozen and not allow_frozen:
        yield f"weights that require no gradient: {join_names(frozen)}"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield "no parameter of the model requires a gradient"


def _iter_run_problems(model: nn.Module) -> Iterator[str]:
    idle = find_idle_modules(model)
    for reason in dict.fromkeys(idle.values()):
        names = [name for name, other in idle.items() if other == reason]
        yield f"{join_names(names)}: {reason}; leave it out of the conversion (module_filter_fn)"
    for name, module in iter_float8_modules(model):
        if deleted := explain_missing_weight(module):
            yield f"{format_module_name(name)}: {deleted}"
        elif (replaced := explain_replaced_forward(module)) and module._last_run.device is not None:
            yield f"{format_module_name(name)}: {replaced}"
        elif replaced and name not in idle:
            logger.warning("%s: %s", format_module_name(name), replaced)


def _iter_backend_problems(model: nn.Module) -> Iterator[str]:
    on_cpu: list[str] = []
    exact: list[str] = []
    not_run: list[str] = []
    traces = find_traces(model.modules())
    for name, module in iter_float8_modules(model):
        if not (weights := _list_weights(name, module)):
            continue
        last_device = get_last_device(module, traces)
        if last_device is None or (
            last_device.type == "cpu" != weights[0][1].device.type
        ):  # it ran on the CPU, then moved
            not_run.append(name)
        elif "exact" in describe_last_backends(module, traces):
            (on_cpu if last_device.type == "cpu" else exact).append(name)
    if on_cpu:
        yield f"float8 layers that multiply exactly, because a CPU has no float8 units: {join_names(on_cpu)}"
    if exact:
        yield "; ".join(
            [f"float8 layers that multiply exactly, not on float8 units: {join_names(exact)}", *list_slow_paths()]
        )
    if not_run:
        yield (
            f"float8 layers that have not run yet, so the backends of their matmuls are unknown: {join_names(not_run)}"
            "; call it after a step. If they run code that was compiled for other modules, run one step under "
            'torch.compiler.set_stance("force_eager")'
        )


def _iter_optimizer_problems(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    counts = Counter(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    weights = [named for name, module in iter_float8_modules(model) for named in _list_weights(name, module)]
    missing = [name for name, weight in weights if weight.requires_grad and id(weight) not in counts]
    if missing:
        yield (
            f"float8 weights that the optimizer does not hold: {join_names(missing)}; make the optimizer after the "
            "conversion and after fully_shard"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    duplicates = [names.get(key, "a parameter of another model") for key, count in counts.items() if count > 1]
    if duplicates:
        yield f"parameters that the optimizer holds more than once: {join_names(duplicates)}"
    with_state = [name for name, weight in weights if getattr(optimizer, "state", {}).get(weight)]
    if with_state and not any(may_have_run(module) for _, module in iter_float8_modules(model)):
        logger.warning(
            "the optimizer has a state for %s, and no float8 layer has run since the conversion: if the state was not "
            "loaded, nothing calls these layers. Check again after a backward, before zero_grad",
            join_names(with_state),
        )
    # Parameters of a loss are foreign, too: report foreign ones only if the optimizer lacks parameters of the model.
    is_incomplete = any(parameter.requires_grad and id(parameter) not in counts for parameter in model.parameters())
    foreign = len([key for key in counts if key not in names])
    if foreign and is_incomplete:
        yield f"the optimizer holds {foreign} parameters that the model does not have; make it after the conversion"


def _list_weights(name: str, module: Float8Module) -> list[tuple[str, Tensor]]:
    """List the weight of a linear by the linear's name, or the 3-D weights of experts by their own names."""
    if isinstance(module, Float8Linear):
        return [] if explain_missing_weight(module) else [(name, module.weight)]
    weights = [(leaf, weight) for leaf, weight in module.named_parameters(recurse=False) if weight.dim() == 3]
    return [(f"{name}.{leaf}".lstrip("."), weight) for leaf, weight in weights]

"""`Probe` observes a linear, or one weight of experts, while a monitor is attached.

The linear calls it as a `MatmulProbe` (linear/protocols.py). It observes sites: the three operands, each with one cast
for both of its matmuls or with one cast for each, and the three results. Each site has a tally in the forward, the
backward or both: a compiled graph may write to a tensor in its forward or in its backward, but not in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.experts.module_weight import ModuleWeight
from quaver.kernels.operands import Operand, Operands
from quaver.linear.protocols import Groups
from quaver.linear.tensor import Float8Tensor
from quaver.numerics import observe
from quaver.numerics.sampling import record_use_and_get_sampling
from quaver.numerics.statistics import clear_tallies, make_tallies, merge_tallies
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.linear_casts import MATMULS


class ProbeSite(NamedTuple):
    """One matrix of a linear: an operand in one of its casts, or a result."""

    operand: str
    cast: str
    """"row", "column", "both" if one cast serves both matmuls, or "result"."""

    @property
    def name(self) -> str:
        return f"{self.operand}.{self.cast}"


OUTPUT, GRAD_INPUT, GRAD_WEIGHT = (ProbeSite(result, "result") for result in MATMULS)

FORWARD_SITES = (
    *(ProbeSite(operand, cast) for operand in ("input", "weight") for cast in ("row", "column", "both")),
    OUTPUT,
)
BACKWARD_SITES = (
    *(ProbeSite("grad_output", cast) for cast in ("row", "column", "both")),
    ProbeSite("weight", "column"),
    GRAD_INPUT,
    GRAD_WEIGHT,
)


def list_sites(config: Float8LinearConfig, trains_weight: bool) -> list[ProbeSite]:
    """List the sites of a linear with this config, in the order of a record."""
    sites = []
    for operand, casts in config.casts._asdict().items():
        for name, cast in (("row", casts.row), ("column", casts.column)):
            if casts.shares_codes:
                name = "both"
            is_read = trains_weight or operand == "weight" or name != "column"
            if is_read and not cast.is_disabled and ProbeSite(operand, name) not in sites:
                sites.append(ProbeSite(operand, name))
    return [*sites, *(ProbeSite(result, "result") for result in MATMULS if trains_weight or result != "grad_weight")]


def make_site_entry(site: ProbeSite, config: Float8LinearConfig) -> dict[str, Any]:
    """Return a site's entry in the header of a record: operand, cast, granularity, dtype, scaling and recipe."""
    entry: dict[str, Any] = {"operand": site.operand, "cast": site.cast, "granularity": "none", "block": None}
    entry |= {"dtype": None, "scaling": None}
    if site.cast != "result":
        cast: CastConfig = config.casts.get(site.operand, "column" if site.cast == "column" else "row")
        entry["granularity"] = cast.scaling_granularity.name.lower()
        entry["dtype"] = str(cast.float8_dtype).removeprefix("torch.")
        entry["scaling"] = cast.scaling_type.name.lower()
        if cast.block_size is not None:
            entry["block"] = "x".join(map(str, cast.block_size))
    recipe = config.recipe_name
    return {**entry, "recipe": recipe.value if recipe else config.short_str()}


_ONE_MATRIX = Groups(0)


class Probe:
    """Passes the operands and results of one weight's matmuls to the operations of observe.py, which fill tallies."""

    forward: Tensor
    """The tallies of the forward, in the order of `FORWARD_SITES`."""
    backward: Tensor
    """The tallies of the backward, in the order of `BACKWARD_SITES`."""
    weight_number: int
    """The number that identifies the weight (`Sampling.assign_number`)."""
    number_tensor: Tensor
    """The same number as int64 () on the CPU, for compiled code."""
    weight: ModuleWeight
    """The weight, whose module's config may change between steps (`set_high_precision_matmuls`)."""
    monitor: Any
    """The `Monitor` that attached the probe."""

    def __init__(self, weight_number: int, weight: ModuleWeight, device: torch.device, monitor: Any = None) -> None:
        self.forward, self.backward = (make_tallies(len(sites), device) for sites in (FORWARD_SITES, BACKWARD_SITES))
        self.weight_number, self.weight, self.monitor = weight_number, weight, monitor
        self.number_tensor = torch.tensor(weight_number, device="cpu")

    def get_tally(self, site: ProbeSite) -> Tensor:
        """Return the tally of a site, [TALLY_WIDTH]. Forward and backward are merged."""
        if site not in BACKWARD_SITES:
            return self.forward[FORWARD_SITES.index(site)]
        tally = self.backward[BACKWARD_SITES.index(site)]
        if site in FORWARD_SITES:
            tally, backward = self.forward[FORWARD_SITES.index(site)].clone(), tally
            merge_tallies(tally, backward)
        return tally

    def clear(self) -> None:
        """Empty all tallies."""
        clear_tallies(self.forward)
        clear_tallies(self.backward)

    def observe_operands(
        self,
        name: str,
        hp: Tensor | None,
        operands: Operands,
        groups: Groups = _ONE_MATRIX,
        *,
        exchanged: bool = False,
    ) -> None:
        if not self._record_use_and_check_sampled():
            return
        hp = _drop_float8(hp)
        is_forward = name == "input" or (name == "weight" and operands.row is not None)
        casts = {"row": operands.row, "column": operands.column}
        if getattr(self.weight.config.casts, name).shares_codes:
            if name == "weight" and not is_forward:
                return  # backward repeats the cast of the forward
            # grad_weight finds the sampled input by the address of the saved column codes; on a CPU both share it.
            both = operands.column or operands.row if name == "input" else operands.row or operands.column
            casts = {"both": both}
        sites, tallies = (FORWARD_SITES, self.forward) if is_forward else (BACKWARD_SITES, self.backward)
        for cast, operand in casts.items():
            if operand is not None and operand.dequant_scale is not None:
                site = ProbeSite(name, cast)
                observe.observe_operand(
                    tallies,
                    sites.index(site),
                    self.number_tensor,
                    site.name,
                    hp,
                    operand.data,
                    operand.dequant_scale,
                    operand.layout,
                    operand.quant_scale,
                    groups.ends,
                    groups.num_experts,
                    exchanged,
                    groups.transposed,
                    is_forward,
                )

    def observe_output(
        self,
        output: Tensor,
        input: Tensor | None,
        weight: Tensor,
        bias: Tensor | None = None,
        groups: Groups = _ONE_MATRIX,
    ) -> None:
        if self._record_use_and_check_sampled():
            weight_hp = _to_matmul_shape(_drop_float8(weight), groups)
            tensors = output, _drop_float8(input), weight_hp, bias, groups.ends, groups.num_experts
            observe.observe_output(self.forward, FORWARD_SITES.index(OUTPUT), self.number_tensor, *tensors)

    def observe_grad_weight(
        self, grad_weight: Tensor, grad_output: Tensor | None, input: Operand, groups: Groups = _ONE_MATRIX
    ) -> None:
        if self._record_use_and_check_sampled():
            saved = (input.data, None) if input.dequant_scale is None else (None, input.data)
            tensors = _to_matmul_shape(grad_weight, groups), grad_output, *saved, groups.ends, groups.num_experts
            observe.observe_grad_weight(self.backward, BACKWARD_SITES.index(GRAD_WEIGHT), self.number_tensor, *tensors)

    def observe_grad_input(
        self,
        grad_input: Tensor,
        grad_output: Tensor | None,
        weight: Tensor | None,
        operand: Operand,
        groups: Groups = _ONE_MATRIX,
    ) -> None:
        if self._record_use_and_check_sampled():
            if operand.dequant_scale is None and not groups.num_experts:
                weight = operand.data
            tensors = grad_input, grad_output, _to_matmul_shape(weight, groups), groups.ends, groups.num_experts
            observe.observe_grad_input(self.backward, BACKWARD_SITES.index(GRAD_INPUT), self.number_tensor, *tensors)

    def _record_use_and_check_sampled(self) -> bool:
        """Record that a matmul of the weight runs. Returns whether the operation is called."""
        # Compiled code always calls the operations, and must not be guarded by the number.
        return torch.compiler.is_compiling() or record_use_and_get_sampling(self.weight_number) is not None


def _drop_float8(tensor: Tensor | None) -> Tensor | None:
    return None if isinstance(tensor, Float8Tensor) else tensor


def _to_matmul_shape(weight: Tensor | None, groups: Groups) -> Tensor | None:
    """Transpose a weight of experts, or its gradient, to [E, N, K] if it is stored as [E, K, N]."""
    return weight.transpose(1, 2) if weight is not None and groups.transposed else weight

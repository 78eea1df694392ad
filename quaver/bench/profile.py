"""Where the time of a linear, a feed-forward or a block goes: a Chrome trace per precision, tables by group and name.

Profiled are forward and backward, without an optimizer, of the modules of modules.py, after a warm-up: bfloat16,
quaver's recipes, and torchao if installed. On a GPU a row's time is that of its kernels, copies and fills; on a CPU it
is the own time of operators and named ranges, and Python and autograd are the own time of `forward` and `backward`.
groups.py defines the groups. A profiler lengthens short operators: compare shares and counts here, and times in
`quaver bench`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

from torch._inductor import config as inductor_config
from torch.profiler import record_function

from quaver.bench.groups import GROUPS, group_of_kernel, group_of_ranges
from quaver.bench.modules import KINDS, make_steps
from quaver.bench.options import MODES, DeviceOptions, ModelOptions, Modes, Recipes, Torchao
from quaver.bench.peer import is_peer_recipe
from quaver.bench.results import BFLOAT16, Result, Row
from quaver.bench.trace import Trace, record_trace
from quaver.delayed import sync_float8_amax_and_scale_history
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf, Positional

FORWARD, BACKWARD = "forward", "backward"

_WARMUP = 3


@dataclass(frozen=True)
class Profile(Modes, Torchao, Recipes, ModelOptions, DeviceOptions):
    """Chrome traces of forward and backward, and a table of kernels by group."""

    what: Annotated[str, OneOf(KINDS), Positional()] = "linear"
    """a linear (gate_proj), a feed-forward or a whole block of a Llama"""
    modes: tuple[Annotated[str, OneOf(MODES)], ...] = ("eager",)
    repeats: AtLeast1 = 3
    """Forwards and backwards in one trace."""
    top: NotNegative = 8
    """Rows of the longest work to print for each precision."""
    output: str = "runs/profiles"
    """Folder of the traces and the summary."""

    @property
    def result_file(self) -> Path:
        """The summary, next to the traces."""
        return Path(self.output) / f"profile-{self.what}.json"

    @property
    def precisions(self) -> list[str]:
        """bfloat16, and each recipe in quaver and, where it has it, in torchao."""
        found = [BFLOAT16]
        for recipe in self.recipe_names:
            found.append(f"quaver {recipe}")
            found += [f"torchao {recipe}"] * (self.with_torchao and is_peer_recipe(recipe))
        return found

    def measure(self) -> Result:
        """Profile each mode and precision; writes a trace of each, and returns a row with the sums of its work.

        Raises:
            RuntimeError: the profiler sees no work of a GPU.
        """
        about = self.about
        named = [f"{self.what} of {about['model']['name']}"], [f"{self.tokens} tokens"]
        cases = product(*named, self.modes, self.precisions)
        rows_of = self._rows_of
        return self.run_cases(cases, lambda _what, _tokens, *case: rows_of(*case), kind=self.what, **about)

    def _rows_of(self, mode: str, precision: str) -> list[Row]:
        path = self.result_file.parent / f"{self.what}-{mode}-{precision.replace(' ', '-')}.json.gz"
        with inductor_config.patch("cpp.enable_kernel_profile", True):  # names a CPU's compiled loops
            call = self._warm_call(mode, precision)
        trace = record_trace(lambda: [call() for _ in range(self.repeats)], self.torch_device, path)
        library, _, recipe = precision.partition(" ")
        about = {"mode": mode, "library": library, "recipe": recipe, "trace": path.name}
        return [about | sums_of(trace, self.repeats, is_cuda=self.torch_device.type == "cuda")]

    def _warm_call(self, mode: str, precision: str) -> Callable[[], None]:
        """Forward and backward in named ranges."""
        step = make_steps(self.what, self, [precision], self.torch_device, compiled=mode == "compiled")[precision]

        def call() -> None:
            source = step.sources.next()
            with record_function(FORWARD):
                loss = step.forward(source)
            with record_function(BACKWARD):
                loss.backward()
            source.grad = None
            step.subject.zero_grad(set_to_none=True)

        for _ in range(_WARMUP):
            call()
            sync_float8_amax_and_scale_history(step.subject)
        return call


def sums_of(trace: Trace, repeats: int, *, is_cuda: bool) -> Row:
    """The time of one forward and backward by group, and the work of each name and direction, the longest first."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for *key, us in _kernels(trace) if is_cuda else _ranges(trace):
        times.setdefault((key[0], key[1], key[2]), []).append(us)
    if not times:
        raise RuntimeError(
            "the profiler saw no kernels of this GPU; it needs CUPTI (or roctracer) and the right to use it"
        )
    total = sum(map(sum, times.values())) / repeats
    work: list[Row] = [
        {
            "name": name,
            "group": group,
            "direction": direction,
            "calls": len(each) / repeats,
            "us": sum(each) / repeats,
            "share": sum(each) / repeats / total if total else 0.0,
        }
        for (name, group, direction), each in times.items()
    ]
    work.sort(key=lambda each: -each["us"])
    group_us = {group: sum(each["us"] for each in work if each["group"] == group) for group in GROUPS}
    shares = {group: us / total if total else 0.0 for group, us in group_us.items()}
    return {"total_us": total, "group_us": group_us, "group_share": shares, "work": work}


_Piece = tuple[str, str, str, float]
"""Name, group, direction, microseconds."""


def _kernels(trace: Trace) -> list[_Piece]:
    pieces = []
    for kernel in trace.kernels:
        around = kernel.launched_in.names_outwards() if kernel.launched_in else []
        by_range = group_of_ranges(around)
        group = by_range if by_range != "other" else group_of_kernel(kernel.name)
        # Autograd runs a GPU's backward on its own thread, outside of the caller's range.
        pieces.append((kernel.name, group, FORWARD if FORWARD in around else BACKWARD, kernel.us))
    return pieces


def _ranges(trace: Trace) -> list[_Piece]:
    """Those inside of forward and backward."""
    pieces = []
    for each in trace.ranges:
        around = each.names_outwards()
        direction = next((name for name in around if name in (FORWARD, BACKWARD)), None)
        if direction is not None:
            pieces.append((each.name, group_of_ranges(around), direction, each.self_us))
    return pieces

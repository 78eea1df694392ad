"""The gain of float8 on a GPU by the ledger of one block: with one recipe, and with the best of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quaver.lab.bench.ledger.subjects import BFLOAT16, COUNTED, Work, check_recipe, count, is_multiplied
from quaver.lab.bench.ledger.times import milliseconds_by_category
from quaver.lab.bench.shapes import model_of
from quaver.lab.memory.compiling.gpu_code import GPUS
from quaver.roofline.device_specs import DeviceSpec, device_spec
from quaver.runtime.devices import MissingDeviceError, cuda_device, has_cuda

MODEL, SEQUENCES, SEQ_LEN = "llama-8b", 2, 8192


@dataclass(frozen=True)
class Verdict:
    """Modelled speeds of one compiled block, of bfloat16's, by recipe."""

    gpu: str
    recipe: str
    speeds: dict[str, float]

    @property
    def sentence(self) -> str:
        """One line on `recipe` and on the fastest of the others."""
        others = {name: speed for name, speed in self.speeds.items() if name != self.recipe}
        best = max(others, key=lambda name: others[name])
        return (
            f"ledger: {self.recipe} has {self.speeds[self.recipe]:.2f} times bfloat16's speed in a compiled block of "
            f"{MODEL} on {self.gpu}, {SEQUENCES} x {SEQ_LEN} tokens; {best}, the best other recipe, has "
            f"{others[best]:.2f} (modelled, not measured)"
        )


def spec_of_this_gpu(recipe: str) -> DeviceSpec:
    """The data of the first GPU of this machine.

    Raises:
        MissingDeviceError: there is none.
        NotImplementedError: no ledger is for it, or it does not multiply the recipe.
    """
    if not has_cuda():
        raise MissingDeviceError("--ledger: this machine has no GPU; `quaver bench ledger --gpu NAME` counts for any")
    spec = device_spec(cuda_device(0))
    if spec is None or spec.name not in GPUS:
        name = torch.cuda.get_device_name(0)
        raise NotImplementedError(f"--ledger: expected a GPU that is one of {', '.join(GPUS)}, got {name}")
    check_recipe(recipe, spec.name)
    return spec


def verdict(recipe: str, spec: DeviceSpec, tell: Callable[[str], None]) -> Verdict:
    """Count a block in bfloat16, in `recipe` and in the recipes that the GPU multiplies; seconds for each.

    Args:
        recipe, spec: as `spec_of_this_gpu` accepts them.
        tell: called with what is compiled.
    """
    work = Work(model_of(MODEL), SEQUENCES, SEQ_LEN)

    def milliseconds(name: str) -> float:
        tell(f"compiling {name} for {spec.name}")
        return sum(milliseconds_by_category(count(work, name, spec.name), spec).values())

    base = milliseconds(BFLOAT16)
    recipes = dict.fromkeys((recipe, *(each for each in COUNTED if is_multiplied(each, spec.name))))
    return Verdict(spec.name, recipe, {each: base / milliseconds(f"quaver {each}") for each in recipes})

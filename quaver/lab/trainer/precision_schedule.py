"""Switches the matmuls of a model between float8 and high precision, step by step (float8.high_precision_schedule)."""

from quaver.conversion.high_precision import iter_float8_modules
from quaver.lab.model.float8 import switch_high_precision_matmuls
from quaver.lab.model.llama import Llama
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.schedule import list_high_precision_matmuls
from quaver.recipes.linear_casts import MATMULS


class PrecisionSchedule:
    """Changes the precision of one model by step."""

    def __init__(self, name: str, model: Llama, config: TrainConfig) -> None:
        """Take `model`, whose precision is `name` in steps that the schedule does not change."""
        self._name, self._model, self._config = name, model, config
        has_float8 = any(True for _ in iter_float8_modules(model))
        self._entries = config.float8.parse_schedule() if has_float8 else ()
        self.step_label = name
        """The label of the last step: the name, the high-precision dtype, or both if some matmuls run in it."""

    def apply(self, step: int) -> None:
        """Run the matmuls of `step` (from 1) in the precision that the schedule names."""
        if not self._entries:
            return
        blocks = list(self._model.iter_blocks())
        block_index = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
        steps, hp_name = self._config.training.steps, self._config.training.mixed_precision_param
        matmuls_by_module = {
            name: list_high_precision_matmuls(self._entries, step, steps, block_index.get(id(module)), len(blocks))
            for name, module in iter_float8_modules(self._model)
        }
        switch_high_precision_matmuls(self._model, matmuls_by_module.__getitem__)
        matmul_sets = set(matmuls_by_module.values())
        if matmul_sets == {()}:
            self.step_label = self._name
        elif matmul_sets == {tuple(MATMULS)}:
            self.step_label = hp_name
        else:
            self.step_label = f"{self._name} and {hp_name}"

"""`monitor`: statistics of every float8 matmul of a model in every k-th training step.

    with quaver.monitor(model, every=100, sink="numerics.jsonl"):
        for batch in batches:
            model(batch).sum().backward()
            optimizer.step()

Each `Float8Linear` and each weight of `Float8Experts` gets a probe while the monitor is open (attached_probes.py). A
step ends with `optimizer.step()` (step_ends.py) or with `Monitor.step()`. At the end of a sampled step, one collective
gathers the tallies of all weights on the first rank, which writes them as one line of a record (sample_writer.py,
record.py). Every rank takes part, even if nothing ran on it.

A step that is not sampled costs one call per cast and result.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from numbers import Integral
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from quaver.experts.module_weight import iter_model_weights
from quaver.numerics.accumulation import get_accumulation
from quaver.numerics.attached_probes import AttachedProbes
from quaver.numerics.extra_statistics import summarize_extras, summarize_sums
from quaver.numerics.logprob_mismatch import Mismatch
from quaver.numerics.probe import Probe
from quaver.numerics.rank_statistics import GatheredStatistics, find_disagreements, gather_tallies
from quaver.numerics.record import SCHEMA_VERSION, AnySink, make_sink
from quaver.numerics.sample_writer import Outcome, SampleWriter
from quaver.numerics.sampling import Sampling
from quaver.numerics.statistics import STATISTICS, make_tallies, summarize_tallies
from quaver.numerics.step_ends import StepEndDetector
from quaver.runtime.agreement import check_ranks_agree, find_collective_device
from quaver.runtime.errors import check_is_module
from quaver.runtime.process_group import has_process_group
from quaver.torch_private.autograd import runs_in_backward

logger = logging.getLogger(__name__)


class MonitorOptions(NamedTuple):
    """The options of a `Monitor` that must be equal on all ranks."""

    every: int
    extras_every: int
    completed_steps: int
    emulate_sums_of: str | None
    steps_by_hand: bool

    @classmethod
    def parse(
        cls,
        *,
        every: object,
        extras_every: object,
        completed_steps: object,
        emulate_sums_of: str | None,
        steps_by_hand: bool,
    ) -> MonitorOptions:
        """Return the options with numbers as ints. Raises ValueError for a number that is out of range."""
        options = cls(
            _parse_number("every", every, "a number of steps of 1 or more", minimum=1),
            _parse_number("extras_every", extras_every, "a number of samples, or 0 for never"),
            _parse_number("completed_steps", completed_steps, "a number of 0 or more"),
            emulate_sums_of,
            steps_by_hand,
        )
        if emulate_sums_of is not None and not options.extras_every:
            raise ValueError("emulate_sums_of: expected extras_every of 1 or more with it, got 0: its sums are extras")
        return options


class Monitor:
    """Samples the numerics of a model's float8 linears and experts until it is closed, as at the end of a `with`.

    It skips forwards in `eval()` mode. It keeps the model alive until it closes. `Monitor.find(model)` returns a
    monitor that the program no longer holds.

    Until an optimizer of the model's parameters has stepped, each `step()` of any optimizer in the process is a
    collective, because that optimizer may hold copies of the parameters. Every rank must then step the same optimizers,
    or set `steps_by_hand`.

    Args:
        model: a converted model, wrapped or not. Every rank makes a monitor, in the same order and with equal options.
        every: sample step 1 and every multiple of this.
        sink: where the first rank writes: a path, a function of a line, or an object with `write` and `close`. None
            only keeps `samples`. A file that exists keeps its lines up to step `completed_steps`; the others are
            removed, which is logged.
        extras_every: in one of this many samples a linear also gets a histogram and its SQNR under other recipes; 0 for
            never.
        completed_steps: the number of steps before this monitor, for a run that resumes.
        history_len: how many of the last samples `samples` holds.
        emulate_sums_of: a GPU, such as "h100", whose sums to emulate for a few rows of each matmul in the samples with
            extras. The model may run on any device.
        steps_by_hand: only `step()` ends a step, and every call ends one; the steps of optimizers are then
            not collectives. Set it in a loop that calls `step()` in every step.
        group: the ranks to gather from; None for all.
    Raises:
        ValueError: a number is out of range, `emulate_sums_of` is unknown or is given without `extras_every`, the model
            has no float8 linears, or another open monitor of this process writes to the path `sink`.
        TypeError: `sink` is not one of the above.
        RuntimeError: another monitor watches this model; another rank raised one of these errors; or the options or
            the float8 layers of the ranks differ.
        Exception: what `sink` raises for the header.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        sink: AnySink = None,
        extras_every: int = 20,
        completed_steps: int = 0,
        history_len: int = 16,
        emulate_sums_of: str | None = None,
        steps_by_hand: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._sampled_step = -1
        self._mismatch: Mismatch | None = None
        self._has_warned = False
        """Whether a warning said that the layers are in eval() mode."""
        self._hook: RemovableHandle | None = None
        self._is_in_hook = False
        self._hooked_monitors: list[Monitor] = []
        """This monitor, for the hook, until it closes."""
        self._is_first_rank = not has_process_group() or dist.get_rank(group) == 0
        self._rank_count = dist.get_world_size(group) if has_process_group() else 1
        self._sampling = Sampling()
        self._probes, self._writer = AttachedProbes(self._sampling), SampleWriter()
        self._is_open = True
        error: BaseException | None = None
        try:
            self._options = MonitorOptions.parse(
                every=every,
                extras_every=extras_every,
                completed_steps=completed_steps,
                emulate_sums_of=emulate_sums_of,
                steps_by_hand=steps_by_hand,
            )
            maxlen = _parse_number("history_len", history_len, "a number of 0 or more")
            self.samples: deque[dict[str, Any]] = deque(maxlen=maxlen)
            """The last samples, on the first rank only."""
            self.completed_steps = self._options.completed_steps
            self._start(model, sink)
        except BaseException as raised:  # noqa: BLE001 - raised below on all ranks, also an interrupt
            error = raised
        try:
            if self._any_over_ranks(error is not None):
                raise error or RuntimeError("the monitor did not start: another rank raised an error")
            self._check_ranks_agree()
            self._plan_next_step()
            self._step_end_detector = StepEndDetector(model, self._any_over_ranks)
            if not steps_by_hand:
                self._hooked_monitors.append(self)
                self._hook = register_optimizer_step_post_hook(partial(_call_monitors, self._hooked_monitors))
        except BaseException:  # also KeyboardInterrupt: no probe may stay
            self.close()
            raise

    @staticmethod
    def find(model: nn.Module) -> Monitor | None:
        """Return the open monitor of a weight of `model`, or None."""
        probes = (probe for _, weight in iter_model_weights(model) for probe in (weight.module.probes or {}).values())
        return next((probe.monitor for probe in probes if isinstance(probe, Probe)), None)

    def _start(self, model: nn.Module, sink: AnySink) -> None:
        """Attach the probes, and write the header on the first rank."""
        check_is_module(model, argument="model")
        if self._options.emulate_sums_of is not None:
            self._sampling.accumulation = get_accumulation(self._options.emulate_sums_of)
        self._probes.attach(model, self)
        self.header = self._make_header(self.completed_steps + 1)
        self._writer.open(make_sink(sink) if self._is_first_rank else None, self.header)

    def _check_ranks_agree(self) -> None:
        if self._rank_count == 1:
            return
        options = ", ".join(f"{name}={value!r}" for name, value in self._options._asdict().items())
        tensors = [f"{tensor.name} {tensor.site.name}" for tensor in self._probes.tensors]
        check_ranks_agree([options, *tensors], self._group, subject="what they monitor")

    def _make_header(self, step: int) -> dict[str, Any]:
        names = {config.recipe_name for config in self._probes.configs.values()}
        recipes = {"custom" if name is None else name.value for name in names}
        return {
            "kind": "header",
            "schema": SCHEMA_VERSION,
            "quaver": version("quaver"),
            "torch": torch.__version__,
            "recipe": recipes.pop() if len(recipes) == 1 else "mixed",
            "every": self._options.every,
            "step": step,
            "ranks": self._rank_count,
            "statistics": list(STATISTICS),
            "tensors": self._probes.make_header_entries(with_sums=self._options.emulate_sums_of is not None),
            **({} if self._options.emulate_sums_of is None else {"sums_of": self._options.emulate_sums_of.lower()}),
        }

    def step(self) -> None:
        """End a training step, unless nothing ran on any rank since the last end, as after `optimizer.step()`.

        Call it if no PyTorch optimizer steps outside a backward, as in a skipped step. It is a collective: every rank
        calls it, even without a batch. It does nothing after the monitor has closed.
        """
        if self._is_open:
            self._probes.reattach_lost()
            if self._hook is None or self._any_over_ranks(self._sampling.has_run):
                self._step_end_detector.record_step_end()
                self._end_steps(1)

    def is_sampled(self, step: int) -> bool:
        """Return whether step `step`, from 1, is sampled."""
        return step == 1 or step % self._options.every == 0

    def record_mismatch(self, measured: Mismatch) -> None:
        """Record how far the trainer of this step is from its rollout (logprob_mismatch.py).

        The next sample records the first rank's figures with the largest `token_mult_prob_error` since the last sample,
        and the rule "mismatch" judges them.
        """
        if self._mismatch is None or measured.token_mult_prob_error > self._mismatch.token_mult_prob_error:
            self._mismatch = measured

    def _end_steps(self, steps: int) -> None:
        self.completed_steps += steps
        if self._sampling.is_on:
            self._write_sample()
        if self._is_open:
            self._plan_next_step()

    def _any_over_ranks(self, condition: bool) -> bool:
        """Return whether `condition` holds on any rank. A collective."""
        return bool(self._max_over_ranks(int(condition)))

    def _max_over_ranks(self, number: int) -> int:
        if self._rank_count == 1:
            return number
        largest = torch.tensor(number, dtype=torch.int32, device=find_collective_device(self._group))
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        return int(largest)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Sample the block, which repeats the step that just ended, at most once per step. A collective.

        The trainer repeats a step whose loss is not finite to find the cause, because the step itself was rarely
        sampled.
        """
        if not self._is_open:
            yield
            return
        self._sampling.start_step(is_on=self._sampled_step != self.completed_steps)
        try:
            yield
            if self._sampling.is_on:
                self._write_sample()
        finally:
            self._probes.clear()
            if self._is_open:
                self._plan_next_step()

    def _plan_next_step(self) -> None:
        """Decide whether to sample the next step, and which layers get extras in it."""
        step = self.completed_steps + 1
        is_sampled = self.is_sampled(step)
        names = self._probes.configs if is_sampled and self._options.extras_every else {}
        # All layers in the first step; then each layer in one of `extras_every` samples, in turn.
        index = step // self._options.every
        with_extras = {
            name for i, name in enumerate(names) if step == 1 or (i + index) % self._options.extras_every == 0
        }
        if self._rank_count == 1:  # other ranks do not know the suspects
            with_extras |= self._writer.suspects & names.keys()
        tensors = [tensor for tensor in self._probes.tensors if tensor.name in with_extras]
        numbers = {tensor.name: tensor.probe.weight_number for tensor in tensors}
        with_sums: frozenset[int] = frozenset()
        if self._options.emulate_sums_of is not None:  # a layer that multiplies exactly has no sums of this GPU
            with_sums = frozenset(number for name, number in numbers.items() if not self._probes.configs[name].emulate)
        self._sampling.start_step(is_on=is_sampled, with_extras=frozenset(numbers.values()), with_sums=with_sums)

    def _after_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self._is_open or runs_in_backward():
            return
        self._probes.reattach_lost()
        if steps := self._step_end_detector.count_ended_steps(optimizer, self._sampling):
            self._is_in_hook = True
            try:
                self._end_steps(steps)
            finally:
                self._is_in_hook = False

    def _write_sample(self) -> None:
        self._sampled_step = self.completed_steps
        if self._probes.update_tensors():  # after set_high_precision_matmuls
            self.header = self._make_header(self.completed_steps)
        tallies = self._probes.stack_tallies()
        extras = self._probes.stack_extras(tallies)
        gathered = gather_tallies(tallies, extras, self._group)
        self._probes.clear()
        failure = None
        if gathered is not None:
            failure = self._writer.write(self.header, partial(self._make_sample, gathered))
        outcome = Outcome(self._max_over_ranks(failure.outcome if failure else Outcome.WRITTEN))
        if outcome is Outcome.STEP_ENDS:
            raise failure.error if failure else RuntimeError("a callback of an alarm ended the step on the first rank")
        if outcome is Outcome.MONITOR_CLOSES:
            if failure is not None:
                failure.log(self.completed_steps)
            self.close()

    def _make_sample(self, gathered: GatheredStatistics) -> dict[str, Any] | None:
        """Make the line of this step and append it to `samples`. Returns None if nothing ran."""
        tensors = self._probes.tensors
        if gathered.tallies.equal(make_tallies(len(tensors), torch.device("cpu"))):
            if not self._has_warned and not self._probes.is_any_training():
                self._has_warned = True
                logger.warning(
                    "the monitor sampled nothing in step %s: all float8 layers are in eval() mode, which it takes for "
                    "validation; call model.train()",
                    f"{self.completed_steps:,}",
                )
            return None
        weights = [tensor.weight_numel for tensor in tensors]
        sample = {"kind": "sample", "step": self.completed_steps, **summarize_tallies(gathered.tallies, weights)}
        if self._mismatch is not None:
            sample["mismatch"], self._mismatch = asdict(self._mismatch), None
        outliers = find_disagreements(gathered.by_rank, self._probes.list_whole_weight_positions())
        if outliers:
            sample["disagree"] = {str(position): rank for position, rank in outliers.items()}
        if gathered.extras is not None:
            sample |= summarize_extras(gathered.extras.numpy())
            if self._options.emulate_sums_of is not None:
                sample["sums"] = summarize_sums(gathered.extras.numpy())
        self.samples.append(sample)
        return sample

    def close(self) -> None:
        """Stop sampling and remove the probes from the model. Compiled code is recompiled without them."""
        # torch iterates over the hooks while one runs, so a hook that closes its monitor stays, without the monitor.
        self._hooked_monitors.clear()
        if self._hook is not None and not self._is_in_hook:
            self._hook.remove()
        if not self._is_open:
            return
        self._is_open = False
        self._probes.detach()
        self._sampling.close()
        self._writer.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _call_monitors(monitors: list[Monitor], optimizer: Optimizer, *_: Any) -> None:
    for monitor in monitors:
        monitor._after_optimizer_step(optimizer)


def _parse_number(option: str, number: object, expected: str, *, minimum: int = 0) -> int:
    if not isinstance(number, Integral) or isinstance(number, bool) or number < minimum:
        raise ValueError(f"{option}: expected {expected}, got {number!r}")
    return int(number)


monitor = Monitor
"""`Monitor` for a `with` statement: lower case, like the class torch.no_grad."""

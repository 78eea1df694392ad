"""Phases are ranges of the profiler, and nothing to the compiler and to fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quaver.runtime.phases import phase, watch_phases


@phase("quaver::test")
def double(tensor):
    return tensor * 2


def test_phases_are_nothing_to_the_compiler():
    compiled = torch.compile(double, backend="eager", fullgraph=True)
    one = torch.ones(3)
    assert torch.equal(compiled(one), one * 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with torch.profiler.profile():
            compiled(one)
        with watch_phases() as open_phases:
            compiled(one)
    assert open_phases == []


def test_phases_are_nothing_to_a_tracer_of_fake_tensors():
    with torch.profiler.profile(), FakeTensorMode():
        assert double(torch.ones(3)).shape == (3,)


def test_a_phase_that_raises_is_closed():
    @phase("quaver::test")
    def fail(tensor):
        raise ValueError(tensor)

    with watch_phases() as open_phases:
        with pytest.raises(ValueError, match="1"):
            fail(1)
        assert open_phases == []

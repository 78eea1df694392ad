"""Tests that phases are ranges of the profiler, which compiled code and fake tensors skip."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quaver.runtime.phases import phase, track_phases


@phase("quaver::test")
def double(tensor):
    return tensor * 2


def test_compiled_code_has_no_phases():
    compiled, ones = torch.compile(double, backend="eager", fullgraph=True), torch.ones(3)
    assert torch.equal(compiled(ones), ones * 2)
    assert torch.equal(compiled(tensor=ones), ones * 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with torch.profiler.profile():
            compiled(ones)
        with track_phases() as open_phases:
            compiled(ones)
    assert open_phases == []


def test_phases_work_with_fake_tensors_under_the_profiler():
    with torch.profiler.profile(), FakeTensorMode():
        assert double(torch.ones(3)).shape == (3,)


def test_a_phase_that_raises_is_closed():
    @phase("quaver::test")
    def fail(tensor):
        raise ValueError(tensor)

    with track_phases() as open_phases:
        with pytest.raises(ValueError, match="1"):
            fail(tensor=1)
        assert open_phases == []

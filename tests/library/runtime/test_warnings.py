"""Tests which file a warning names."""

import threading

import pytest
from torch import nn

from quaver.conversion import high_precision


def call_in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_warning_names_the_user_or_without_one_its_origin(in_thread):
    """A thread that runs a function of quaver has no frame of the user's."""
    call, args = high_precision.set_high_precision_matmuls, (nn.Linear(8, 8), ["output"])
    with pytest.warns(UserWarning, match="changed nothing") as warned:
        call_in_thread(call, *args) if in_thread else call(*args)
    assert warned[0].filename == (high_precision.__file__ if in_thread else __file__)

"""`assert_float8_training(require_native=True)`; other tests of the function are in tests/foreign/."""

import pytest
from torch import nn

from quaver import Float8Linear, assert_float8_training, convert_to_float8_training
from quaver.runtime.slow_paths import say_once


def test_training_may_be_required_to_multiply_natively():
    model = nn.Sequential(*(Float8Linear(16, 16, device="meta") for _ in range(2)))  # no device is needed to tell
    assert_float8_training(model)
    with pytest.raises(RuntimeError, match="have not run yet, so nothing is known of their matmuls: 0, 1$"):
        assert_float8_training(model, require_native=True)
    model[0]._backend = model[1]._backend = "native"
    assert_float8_training(model, require_native=True)
    say_once("key", "no native matmul on cuda:0")
    for backend in ("exact", "native and exact"):
        model[1]._backend = backend
        assert_float8_training(model)
        with pytest.raises(RuntimeError, match="multiply exactly on a GPU, not natively: 1; no native matmul"):
            assert_float8_training(model, require_native=True)


def test_a_cpu_is_not_required_to_multiply_natively():
    assert_float8_training(convert_to_float8_training(nn.Linear(16, 16)), require_native=True)

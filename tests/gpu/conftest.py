"""Provides the virtual GPU where QUAVER_VIRTUAL_GPU asks for one."""

import numpy as np
import pytest

from tests.gpu.device import VIRTUAL
from tests.virtual_gpu import virtual_gpu


@pytest.fixture(autouse=True)
def _virtual_gpu():
    if not VIRTUAL:
        yield
        return
    with virtual_gpu(VIRTUAL), np.errstate(all="ignore"):  # the interpreter's infinities and NaNs are intended
        yield

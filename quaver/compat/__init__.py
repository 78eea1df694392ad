"""torchao's float8 training API under torchao's module paths: aliases of quaver's own functions and classes.

    from torchao.float8 import convert_to_float8_training      ->  from quaver.compat.float8 import ...
    from torchao.float8.float8_linear import Float8Linear      ->  from quaver.compat.float8.float8_linear import ...

The paths and names are from torchao 0.18; names of 0.9 that 0.18 dropped exist too. The modules of `torchao.float8` can
also be imported directly from `quaver.compat`, for example `quaver.compat.float8_linear`.

Two things differ from torchao. `convert_to_float8_training` changes modules in place, so a root `nn.Linear` keeps its
identity. Tools that replace layers after training, such as `torchao.quantization.quantize_`, look for plain
`nn.Linear`: call `quaver.convert_to_high_precision(model)` first.
"""

import os

__path__ = [*__path__, os.path.join(os.path.dirname(__file__), "float8")]

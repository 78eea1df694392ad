"""torchao's float8 training API under torchao's module paths: aliases of quaver's own functions and classes.

    from torchao.float8 import convert_to_float8_training      ->  from quaver.compat.float8 import ...
    from torchao.float8.float8_linear import Float8Linear      ->  from quaver.compat.float8.float8_linear import ...

Paths and names are those of torchao 0.18, and those of 0.9 that 0.18 has dropped. The modules of `torchao.float8` are
also found right under `quaver.compat`, as `quaver.compat.float8_linear`.

What differs from torchao: `convert_to_float8_training` changes modules in place, so that a root `nn.Linear` keeps its
identity; and tools that replace layers after training, such as `torchao.quantization.quantize_`, look for plain
`nn.Linear`: call `quaver.convert_to_high_precision(model)` first.
"""

import os

__path__ = [*__path__, os.path.join(os.path.dirname(__file__), "float8")]

"""The part of `quaver doctor --ledger RECIPE`: what float8 gains on this machine's GPU by the ledger of a block."""

from quaver.lab.bench.ledger.subjects import check_triton
from quaver.lab.bench.ledger.verdict import Verdict, spec_of_this_gpu, verdict
from quaver.lab.bench.working import working
from quaver.lab.cli.errors import bad_input
from quaver.recipes.config import Float8LinearRecipeName


def verdict_for_this_gpu(recipe: str) -> Verdict:
    """Compile and count; after an error of bad input if there is no GPU that a ledger is for, or no triton."""
    with bad_input():
        name = Float8LinearRecipeName(recipe).value
        spec = spec_of_this_gpu(name)
        check_triton()
    with working("compiling") as tell:
        return verdict(name, spec, tell)

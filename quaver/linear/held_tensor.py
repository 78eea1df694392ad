"""A saved tensor that hooks hold as it is, with the check of its version that autograd makes only without hooks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from quaver.torch_private.versions import version_of


class HeldTensor:
    """Stands in for a saved tensor, and refuses to give it back when it was written to in place since."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A node that saves its own output would keep itself alive. A leaf is saved as it is, as autograd does.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = version_of(tensor) if _counts_versions(tensor) else None

    def unpack(self) -> Tensor:
        """The saved tensor.

        Raises:
            RuntimeError: it was written to in place.
        """
        if self.version is not None and version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {version_of(self.tensor)}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


def _counts_versions(tensor: Tensor) -> bool:
    """A detached wrapper subclass has a version counter of its own; an inference tensor has none."""
    return type(tensor) in (Tensor, Parameter) and not tensor.is_inference()

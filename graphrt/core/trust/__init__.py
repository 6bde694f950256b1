"""Whether a graph still stands for its forward."""

from graphrt.core.trust.verify import check_equal
from graphrt.core.trust.weights import AddressBook, Parameters, Tensors, check_parameters

__all__ = [
    "AddressBook",
    "Parameters",
    "Tensors",
    "check_equal",
    "check_parameters",
]

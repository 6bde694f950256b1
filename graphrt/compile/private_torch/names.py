"""The list of torch's private names that `graphrt.compile` uses."""

from __future__ import annotations

from typing import Any

import torch

from graphrt.core.base.errors import MissingTorchNameError
from graphrt.core.base.private_torch import PrivateNames

NAMES = PrivateNames()


def private_attribute(value: Any, attribute: str, without: str) -> Any:
    """A private attribute of one of torch's objects; raises `MissingTorchNameError` if it has
    none."""
    try:
        return getattr(value, attribute)
    except AttributeError as error:
        raise MissingTorchNameError(
            f"a {type(value).__name__} of this torch has no {attribute}",
            got=f"torch {torch.__version__}",
            advice=f"without it {without}",
        ) from error

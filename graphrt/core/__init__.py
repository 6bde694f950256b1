"""The device-neutral part: planning, dispatch, capture, replay, trust.

Torch comes first, with an explanation of what makes its import fail; then the log. `import graphrt`
alone and the command's help load neither.
"""

from graphrt.core.base import torch_import as _torch_import  # noqa: F401  isort: skip
from graphrt.core.base.log import set_up_logging as _set_up_logging

_set_up_logging()

"""The device-neutral part: planning, dispatch, capture, replay, trust.

Torch comes first, then the log. `import graphrt` alone and the command's help load neither.
"""

import torch as _torch  # noqa: F401  isort: skip
from graphrt.core.base.log import set_up_logging as _set_up_logging

_set_up_logging()

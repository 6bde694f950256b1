"""The denoisers of pipelines of diffusers, by graphs: see `docs/how-to/diffusers.md`.

    pipe = with_graphs(pipe)

The forward of `pipe.unet` or `pipe.transformer` is replaced on the instance, and nothing else.
Schedulers, encoders, guidance and callbacks stay diffusers' own. diffusers itself is not imported.
"""

from graphrt.hosts.diffusers.denoiser import (
    DenoiserReport,
    EagerDenoiserWarning,
    EagerReason,
)
from graphrt.hosts.diffusers.installing import capture, report, with_graphs, without_graphs

__all__ = [
    "DenoiserReport",
    "EagerDenoiserWarning",
    "EagerReason",
    "capture",
    "report",
    "with_graphs",
    "without_graphs",
]

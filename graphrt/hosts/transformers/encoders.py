"""`EncoderGraphs`: the seam between a model that is called once a batch, and its graphs.

Encoders, embedders and classifiers of texts (BERT) and pictures (ViT, CLIP's towers). Only their
`forward` is replaced: a call that graphs serve is replayed, and others go on to the model's own
forward, with a reason in the log and in `report()`.

A change of the model is found within some calls: each looks at a share of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from graphrt import GraphOptions, Reason
from graphrt.core.base.log import logger
from graphrt.core.runner.findings import Look
from graphrt.errors import (
    CaptureError,
    GraphRTError,
    InvalidOptionError,
    ResourceExhaustedError,
    VerificationError,
)
from graphrt.hosts.same_model import SameModel
from graphrt.hosts.transformers.buckets import Buckets, check_encoder, masks_of
from graphrt.hosts.transformers.reports import ModelReport
from graphrt.hosts.transformers.seam import NO_GRAPHS, Seam

_LOOKED_AT = 16
"""As many modules have about as many values as a call looks at."""

_OF_MODELS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""A model that expects a mask of other dimensions, or none, raises one of these."""


def _may_come_of_a_mask(error: Exception) -> bool:
    """Whether a capture may succeed with another mask. Without memory it would fail again, after
    as long a time, and hide the first error."""
    if isinstance(error, GraphRTError):
        is_of_memory = isinstance(error, ResourceExhaustedError)
        return isinstance(error, CaptureError | VerificationError) and not is_of_memory
    return isinstance(error, _OF_MODELS) and not isinstance(error, torch.cuda.OutOfMemoryError)


class EncoderGraphs(Seam):
    """Serves the calls of one encoder by graphs; `with_graphs` makes it, `graphs_of` finds it."""

    def __init__(
        self,
        model: Any,
        max_batch: int,
        lengths: Sequence[int],
        sizes: Sequence[int],
        options: GraphOptions,
    ) -> None:
        super().__init__(model)
        self.max_batch, self.lengths = max_batch, lengths
        self._sizes, self._options = sizes, options
        self._shares = -(-sum(1 for _ in model.modules()) // _LOOKED_AT)
        self._names = list(inspect.signature(self._forward).parameters)

    def _methods(self) -> dict[str, Callable[..., Any]]:
        return {"forward": self._dispatch}

    @property
    def buckets(self) -> Buckets | None:
        """The graphs of the model's adapters; None without graphs."""
        return None if self._captured is None else self._captured.graphs

    def _capture(self, beside: Buckets | None) -> Buckets:
        check_encoder(self.model)
        make = partial(
            Buckets,
            self.model,
            self._forward,
            self._names,
            max_batch=self.max_batch,
            lengths=self.lengths,
            sizes=self._sizes,
            options=self._options,
        )
        for mask in masks_of(self.model.config):
            try:
                return make(mask=mask)
            except Exception as error:
                self._refuse_length(error)
                # The model makes another mask, or reads its mask differently: try the next maker.
                if mask is None or not _may_come_of_a_mask(error):
                    raise
                name = type(self.model).__name__
                logger.info("%s is captured with another mask: %s", name, error)
        raise AssertionError("the last mask is None, whose error is raised above")

    def _refuse_length(self, error: Exception) -> None:
        """Raise `InvalidOptionError` for an error of texts longer than the model's positions."""
        counts = [
            # RoBERTa's begin behind the index of padding.
            each.num_embeddings - (-1 if each.padding_idx is None else each.padding_idx) - 1
            for name, each in self.model.named_modules()
            if "position_embedding" in name and isinstance(each, torch.nn.Embedding)
        ]
        length = self.lengths[-1]
        if isinstance(error, IndexError | RuntimeError) and length > min(counts, default=length):
            raise InvalidOptionError(
                "max_len is above the number of the model's positions",
                got=length,
                expected=f"at most {min(counts)}",
                advice=f"max_len={min(counts)}",
            ) from error

    def _dispatch(self, *args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(self._names, args, strict=False)), **kwargs} if args else kwargs
        if not self._using.acquire(blocking=False):
            self._counts.note("another thread is in a call of the model")
            return self._forward(*args, **kwargs)
        try:
            reason, length = self._why_eager(call)
            if reason is not None or self.buckets is None:
                self._counts.note(reason or NO_GRAPHS)
                return self._forward(*args, **kwargs)
            inputs = {name: call[name] for name in self.buckets.names if call.get(name) is not None}
            output, dispatch = self.buckets.run(inputs, length)
        finally:
            self._using.release()
        if dispatch is None or dispatch.reason is Reason.HIT:
            self._counts.served += 1
        else:
            self._counts.note(f"graphrt says {dispatch.reason.name}")
        return output

    def _look(self, model: SameModel) -> Look:
        # After a change all is looked at: the next share alone may have none.
        has_changed = self._captured is None or not self._captured.adapters.are_same()
        return model.look() if self._changed or has_changed else model.look_at_share(self._shares)

    def _why_eager(self, call: Mapping[str, Any]) -> tuple[str | None, int]:
        """Why a call is not served, None if it is; and the length of its graphs."""
        buckets = self.buckets
        if buckets is None:
            return NO_GRAPHS, 0
        self._look_at_model(captures=not torch.is_grad_enabled())
        main = call.get(self.model.main_input_name)
        reason = self._why_other_model() or _why_other_inputs(call, buckets, main)
        if reason is not None:
            return reason, 0
        assert isinstance(main, torch.Tensor)
        if main.shape[0] > self.max_batch:
            return f"{main.shape[0]} rows are above max_batch={self.max_batch}", 0
        length = buckets.length_of({"input_ids": main})
        if length is None:
            return f"the text is longer than {buckets.lengths[-1]} tokens", 0
        return None, length

    def report(self) -> ModelReport:
        """How calls ran since `with_graphs()`."""
        counts, refused = self._counts, self._refused
        return ModelReport(counts.served, dict(counts.eager), 0, refused, None, unit="calls")


def _why_other_inputs(call: Mapping[str, Any], buckets: Buckets, main: Any) -> str | None:
    if not isinstance(main, torch.Tensor) or main.dim() != (2 if buckets.is_text else 4):
        return "no input of the usual dimensions"
    for name, value in call.items():
        if value is None or value is False or (name == "return_dict" and value is True):
            continue  # as if it were not passed
        reason = _why_other_input(name, value, buckets, main)
        if reason is not None:
            return reason
    return "return_dict=False was passed" if call.get("return_dict") is False else None


def _why_other_input(name: str, value: Any, buckets: Buckets, main: torch.Tensor) -> str | None:
    if name not in buckets.names:
        return f"{name}= was passed"
    if not isinstance(value, torch.Tensor) or value.shape != main.shape:
        return f"{name}= of another shape than the inputs was passed"
    dtype, shape = buckets.kinds[name]
    if value.dtype != dtype:
        return f"{name}= of {value.dtype} was passed"
    if shape and value.shape[1:] != shape:
        return f"{name}= of the shape {tuple(value.shape[1:])} was passed"
    return None

"""`Buckets`: the captured calls of an encoder, by batch and by length.

1. A text is padded to the next length that has graphs, under a mask; its batch to the next size, as
   a runner does it. Pictures have one length.
2. Two short eager runs tell which dimensions of the outputs are lengths: there, padding is cut off.
3. The mask of attention is made here, by one of `masks_of`: given a mask of two dimensions, models
   read it on the host.
4. Graphs are compared with the model's own call of the same inputs without padding. A model that
   lets padding through (it pools without a mask, say), or has another mask, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from graphrt import Batch, Dispatch, Example, GraphOptions, GraphPool, GraphRunner, Host, InputSpec
from graphrt.errors import CaptureError, VerificationError
from graphrt.hosts.transformers.signature import CACHES, advice_for_outputs
from graphrt.hosts.transformers.steps import CLOSE

Inputs = Mapping[str, torch.Tensor]
MaskMaker = Callable[[Any, torch.Tensor, torch.Tensor], Any]
"""From a config, states `(size, length, ...)` and a mask `(size, length)` to attention's mask."""

_TEXT = ("input_ids", "attention_mask", "token_type_ids")
_SHORT = 4
"""Tokens of the texts in the short eager runs."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Buckets:
    """Captures and replays the calls of one encoder; `names` are the inputs that graphs take."""

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        names: Sequence[str],
        *,
        max_batch: int,
        lengths: Sequence[int],
        sizes: Sequence[int],
        options: GraphOptions,
        mask: MaskMaker | None,
    ) -> None:
        """Captures; raises what capturing raises, and `VerificationError` if graphs do not give
        what the model gives. Pictures have no `lengths`. `mask` is one of `masks_of`."""
        self._mask = mask
        self._model, self._forward, self._max_batch = model, forward, max_batch
        self.is_text = model.main_input_name == "input_ids"
        self.names = [name for name in _TEXT if name in names] if self.is_text else ["pixel_values"]
        self.lengths = sorted(lengths) if self.is_text else [0]
        shapes = [
            {
                name: each.shape
                for name, each in _tensors(
                    self._call_model(self._random(1, length)), model.config
                ).items()
            }
            for length in ((_SHORT, _SHORT + 1) if self.is_text else (0, 0))
        ]
        self.kinds = {
            name: (each.dtype, () if self.is_text else tuple(each.shape[1:]))
            for name, each in self._random(1, _SHORT).items()
        }
        """The dtype of each input, and the shape of one picture; of a text it is ()."""
        # Name of an output -> the dimension that is a length, to be cut; None: it has none.
        self._cut = {
            name: _first_other(shape, shapes[1][name]) for name, shape in shapes[0].items()
        }
        self._output: Callable[..., Any] = type(self._call_model(self._random(1, _SHORT)))
        pool = GraphPool(model.device.type, device=model.device)
        self.pool, self._runners = pool, dict[int, GraphRunner[Any]]()
        try:
            for length in reversed(self.lengths):
                self._runners[length] = runner = GraphRunner(
                    self._call,
                    inputs={
                        name: InputSpec(each.dtype, ("tokens", *each.shape[1:]), pad=_padding(name))
                        for name, each in self._random(1, length).items()
                    },
                    mode="FULL",
                    sizes=sizes,
                    host=Host(example=self._example_of(length)),
                    options=options,
                    pool=pool,
                )
                runner.capture()
                self._compare(length)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy the graphs."""
        for runner in self._runners.values():
            runner.close()
        self.pool.close()

    def length_of(self, inputs: Inputs) -> int | None:
        """The length of the graphs that serve these inputs; None if none is long enough."""
        if not self.is_text:
            return 0
        live = inputs["input_ids"].shape[1]
        return next((length for length in self.lengths if length >= live), None)

    def run(self, inputs: Inputs, length: int) -> tuple[Any, Dispatch | None]:
        """The model's output, by a graph of this length."""
        runner, rows, live = self._runners[length], len(next(iter(inputs.values()))), 0
        if self.is_text:
            live = inputs["input_ids"].shape[1]
            inputs = self._padded(inputs, length - live)
        outputs = runner(Batch(rows), **inputs)
        cut = {
            name: each if self._cut[name] is None else each.narrow(self._cut[name], 0, live)
            for name, each in outputs.items()
        }
        copies = {name: each.clone() for name, each in cut.items()}
        return self._output(**copies), runner.last_dispatch

    def _padded(self, inputs: Inputs, count: int) -> Inputs:
        """All inputs of a text, with `count` tokens of padding behind it."""
        tokens = inputs["input_ids"]
        padded: dict[str, torch.Tensor] = {}
        for name in self.names:
            tensor = inputs.get(name)
            if tensor is None:
                default = torch.ones_like if name == "attention_mask" else torch.zeros_like
                tensor = default(tokens)
            padded[name] = pad(tensor, (0, count), value=self._filler(name)) if count else tensor
        return padded

    def _filler(self, name: str) -> int:
        return int(self._model.config.pad_token_id or 0) if name == "input_ids" else 0

    def _call(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The call that is captured."""
        mask = inputs.get("attention_mask")
        call: dict[str, Any] = dict(inputs)
        if mask is not None and self._mask is not None:
            states = mask[:, :, None].to(self._model.dtype)
            call["attention_mask"] = self._mask(self._model.config, states, mask)
        return _tensors(self._call_model(call), self._model.config)

    def _call_model(self, inputs: Mapping[str, Any]) -> Any:
        return self._forward(**inputs, return_dict=True)

    def _random(
        self, rows: int, length: int, generator: torch.Generator | None = None
    ) -> dict[str, torch.Tensor]:
        generator = generator or torch.Generator("cpu").manual_seed(0)
        config, device = self._model.config, self._model.device
        if not self.is_text:
            size = config.image_size
            height, width = size if isinstance(size, list | tuple) else (size, size)
            shape = rows, config.num_channels, height, width
            return {
                "pixel_values": torch.randn(
                    shape, generator=generator, dtype=torch.float32, device="cpu"
                ).to(device, self._model.dtype)
            }
        tokens = torch.randint(
            config.vocab_size, (rows, length), generator=generator, device="cpu"
        ).to(device)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        inputs["attention_mask"][0, length - length // 4 :] = 0
        inputs["token_type_ids"] = torch.zeros_like(tokens)
        return {name: inputs[name] for name in self.names}

    def _example_of(self, length: int) -> Callable[[Batch, torch.Generator], Example]:
        return lambda batch, generator: Example(self._random(batch.num_tokens, length, generator))

    def _compare(self, length: int) -> None:
        full, padded = self._random(self._max_batch, length), max(self._max_batch - 1, 1)
        if self.is_text:
            # The first and the last token attend to each other: a window that is too short shows.
            full["attention_mask"] = torch.ones_like(full["input_ids"])
        for inputs in (full, self._random(padded, max(length - 1, 1))):
            outputs = self.run(inputs, length)[0], self._call_model(inputs)
            ours, theirs = (_tensors(each, self._model.config) for each in outputs)
            for name, expected in theirs.items():
                error = float((ours[name] - expected).float().norm() / expected.float().norm())
                if not error <= CLOSE.get(expected.dtype, 1e-2):
                    raise VerificationError(
                        "a call by a graph is not what the model gives without padding",
                        got=f"{name} that differs by {error:.2g} of its norm",
                        expected="the same, but for rounding",
                        advice="leave with_graphs() out for this model",
                    )


def _bidirectional(config: Any, states: torch.Tensor, mask: torch.Tensor) -> Any:
    from transformers import masking_utils

    makers = {
        _FULL: masking_utils.create_bidirectional_mask,
        _SLIDING: masking_utils.create_bidirectional_sliding_window_mask,
    }
    return _by_layer(config, makers, states, mask, allow_is_bidirectional_skip=False)


def _causal(config: Any, states: torch.Tensor, mask: torch.Tensor) -> Any:
    from transformers import masking_utils

    makers = {
        _FULL: masking_utils.create_causal_mask,
        _SLIDING: masking_utils.create_sliding_window_causal_mask,
    }
    options = {"past_key_values": None, "allow_is_causal_skip": False}
    return _by_layer(config, makers, states, mask, **options)


def _by_layer(
    config: Any,
    makers: Mapping[str, Callable[..., Any]],
    states: torch.Tensor,
    mask: torch.Tensor,
    **options: Any,
) -> Any:
    """One mask for all layers, or one for each kind of layer where the config has kinds."""
    call = {"config": config, "inputs_embeds": states, "attention_mask": mask, **options}
    if _SLIDING in _kinds(config):
        return {kind: make(**call) for kind, make in makers.items()}
    slides = not _kinds(config) and getattr(config, "sliding_window", None) is not None
    return makers[_SLIDING if slides else _FULL](**call)


def masks_of(config: Any) -> tuple[MaskMaker | None, ...]:
    """Makers of masks to try: a comparison tells which one is the model's. None leaves the mask to
    the model. It is the only one where a comparison may miss a difference: with chunks, or another
    kind of window, by which a few tokens of a long text see a few others."""
    all_known = not _kinds(config) - {_FULL, _SLIDING}
    if all_known and not getattr(config, "use_bidirectional_attention", False):
        return _bidirectional, _causal, None
    return (None,)


def _kinds(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def check_encoder(model: Any) -> None:
    """Raise `CaptureError` for a model whose inputs are neither a text nor a picture."""
    config, name = model.config, model.main_input_name
    if name == "input_ids" and hasattr(config, "vocab_size"):
        return
    if name == "pixel_values" and hasattr(config, "image_size") and hasattr(config, "num_channels"):
        return
    raise CaptureError(
        "with_graphs() cannot make up an input of this model to capture with",
        got=f"{type(model).__name__}, which takes {name}",
        expected="input_ids, or pixel_values of an image_size",
        advice="leave with_graphs() out, or call it for the parts of the model",
    )


def _tensors(output: Any, config: Any) -> dict[str, torch.Tensor]:
    """The outputs of a model by name; raises `CaptureError` where one is no tensor."""
    tensors = dict(output.items())
    others = sorted(name for name, each in tensors.items() if not isinstance(each, torch.Tensor))
    if others:
        has_cache = set(others) <= {*CACHES}
        raise CaptureError(
            "the model returns more than tensors",
            got=", ".join(others),
            expected="tensors alone",
            advice="model.config.use_cache = False before with_graphs()"
            if has_cache
            else advice_for_outputs(config),
        )
    return tensors


def _first_other(one: torch.Size, other: torch.Size) -> int | None:
    """The first dimension in which two shapes differ."""
    return next(
        (at for at, sizes in enumerate(zip(one, other, strict=True)) if sizes[0] != sizes[1]), None
    )


def _padding(name: str) -> int:
    """The values of padding rows. Their mask is 1: a row that attends to no token would be NaN."""
    return 1 if name == "attention_mask" else 0

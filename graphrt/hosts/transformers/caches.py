"""Two caches over one `Memory`: the one that transformers sees, and the one inside of graphs.

- `KeptCache` is a `DynamicCache` whose keys, values and states are in the memory. Eager forwards
  see tensors as long as the sequence, so masks and kernels are those of a `DynamicCache`. Beam
  search, cropping and all else that transformers does to its layers work on it.
- Sliding layers may keep their window alone, as a ring in which a token overwrites the one that has
  left the window. Attention looks at all of it, in any order: the mask says which are padding.
- `StepCache` is the same memory at full length, for one captured step of some tokens a row. Rows
  and positions are in tensors, so one graph serves all positions. Each run of the forward makes a
  new one.

A `KeptCache` leaves the memory when another sequence needs it, or when its own does not fit any
more (more rows or positions). It then copies its tensors out and is an ordinary `DynamicCache`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
)

from graphrt.hosts.transformers.memory import LayerMemory, Memory, first_rows, write

Tensors = tuple[torch.Tensor, torch.Tensor]

# The cache that transformers sees --------------------------------------------------------------


TAKEN = "another call has the memory"
_OTHER = "the cache has other rows, shapes or dtypes than the memory"
_PAST = "the cache keeps past states, to be cropped"


class Residence:
    """Says whether the layers of one `KeptCache` are in the memory (`attached`), and in how many of
    its `most_rows` rows. The layers share it, so all of them leave at once."""

    def __init__(self, most_rows: int, attached: bool = True) -> None:
        self.most_rows = most_rows
        self.rows = 0
        """Rows of the sequences; 0 before the first prompt."""
        self.attached = attached
        self.why_left = TAKEN
        """Why the layers are not in the memory, once they are not."""
        self.layers: list[Any] = []

    def takes(self, rows: int) -> bool:
        """Whether tensors of this many rows may be in the memory; the first call sets the number of
        rows."""
        if self.attached and self.rows == 0 and rows <= self.most_rows:
            self.rows = rows
        return self.attached and rows == self.rows

    def leave(self, why: str) -> None:
        """Copy all layers out of the memory."""
        if self.attached:
            for layer in self.layers:
                layer.take_along()
            self.attached, self.why_left = False, why


class KeptLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in the memory, or the layer's own tensors once the cache has left it.

    `keys` and `values` are views as long as the sequence. What is assigned to them (by
    `reorder_cache` or `crop`) is copied into the memory.
    """

    def __init__(self, memory: LayerMemory, residence: Residence, **arguments: int) -> None:
        self._memory, self._residence = memory, residence
        # Tokens of the sequence so far.
        self._seen = 0
        # "keys" and "values" -> the layer's own tensors, once the cache has left the memory.
        self._tensors: dict[str, torch.Tensor] = {}
        super().__init__(**arguments)

    @property
    def keys(self) -> torch.Tensor | None:
        return self._read("keys")

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._write("keys", keys)

    @property
    def values(self) -> torch.Tensor | None:
        return self._read("values")

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._write("values", values)
        # Not with the keys: until both are written, both are read at the old length.
        if values is not None:
            self._seen = self._end(values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tensors:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        memory, start = self._memory, self._seen
        end = start + key_states.shape[-2]
        if self._fits(key_states, end, memory.keys) and self._fits(
            value_states, end, memory.values
        ):
            rows = key_states.shape[0]
            memory.keys[:rows, start:end].copy_(key_states.transpose(1, 2))
            memory.values[:rows, start:end].copy_(value_states.transpose(1, 2))
            self._seen = end
            if start == 0:
                return key_states, value_states
            return self._view(memory.keys), self._view(memory.values)
        for name, states in (("keys", key_states), ("values", value_states)):
            earlier = self._tensors.get(name)
            self._tensors[name] = (
                states if earlier is None else torch.cat([earlier, states], dim=-2)
            )
        self._seen = end
        return self._tensors["keys"], self._tensors["values"]

    def get_seq_length(self) -> int:
        return self._seen

    def stepped(self, tokens: int) -> None:
        """Count the tokens of each row that a graph has written."""
        self._seen += tokens

    def take_along(self) -> None:
        """Copy keys and values into tensors of the layer's own."""
        keys, values = self.keys, self.values
        if keys is not None and values is not None and self._seen:
            self._tensors = {"keys": keys.clone(), "values": values.clone()}

    def move_in(self, residence: Residence) -> None:
        """Copy keys and values into the memory."""
        tensors, self._tensors, self._residence = self._tensors, {}, residence
        for name, tensor in tensors.items():
            self._write(name, tensor)

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[: self._residence.rows, : self._seen].transpose(1, 2)

    def _end(self, tensor: torch.Tensor) -> int:
        """The length of the sequence up to the last token of `tensor`, which is assigned."""
        return tensor.shape[-2]

    def _place(self, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        target = memory[: tensor.shape[0], : tensor.shape[-2]].transpose(1, 2)
        if target.data_ptr() != tensor.data_ptr() or target.stride() != tensor.stride():
            target.copy_(tensor)

    def _read(self, name: str) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        if self._residence.attached:
            return self._view(getattr(self._memory, name))
        return self._tensors.get(name)

    def _write(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            return
        memory: torch.Tensor = getattr(self._memory, name)
        if self._fits(tensor, self._end(tensor), memory):
            self._place(memory, tensor)
        else:
            self._tensors[name] = tensor

    def _fits(self, states: torch.Tensor, length: int, memory: torch.Tensor) -> bool:
        """Whether states of a sequence of `length` tokens may be in the memory; else the cache
        leaves it. Under autocast, say, they have another dtype."""
        residence = self._residence
        if not residence.attached:
            return False
        if length > self._memory.length:
            residence.leave(f"the sequence is longer than {self._memory.length} tokens")
        elif (
            states.dtype is not memory.dtype
            or states.device != memory.device
            or (states.shape[1], states.shape[3]) != tuple(memory.shape[2:])
            or not residence.takes(states.shape[0])
        ):
            residence.leave(_OTHER)
        return residence.attached


class KeptWindow(KeptLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer that slides, in a ring: position `p` is at `p % window`.

    `keys` and `values` are copies of the last `window - 1` positions in their order, as they are in
    transformers' own layer. What is assigned to them is written back into the ring.
    """

    def __init__(self, memory: LayerMemory, residence: Residence, window: int) -> None:
        super().__init__(memory, residence, sliding_window=window)

    @property
    def cumulative_length(self) -> int:
        return self._seen

    @cumulative_length.setter
    def cumulative_length(self, length: int) -> None:
        self._seen = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tensors:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys, self.values
        if self._seen and keys is not None and values is not None:
            keys = torch.cat([keys, key_states], dim=-2)
            values = torch.cat([values, value_states], dim=-2)
        else:
            keys, values = key_states, value_states
        end = self._seen + key_states.shape[-2]
        # Before the length changes: a cache that leaves the memory copies what it has there.
        self._fits(key_states, end, self._memory.keys)
        self._fits(value_states, end, self._memory.values)
        self._seen = end
        first = 0 if self.record_past else 1 - self.sliding_window
        self.keys, self.values = keys[:, :, first:], values[:, :, first:]
        return keys, values

    def activate_past_recording(self) -> None:
        # A ring has overwritten what a crop needs.
        self._residence.leave(_PAST)
        super().activate_past_recording()

    def move_in(self, residence: Residence) -> None:
        # After assisted generation the tensors may be longer than a window.
        self.record_past = False
        for name, tensor in self._tensors.items():
            self._tensors[name] = tensor[:, :, 1 - self.sliding_window :]
        super().move_in(residence)

    def _end(self, tensor: torch.Tensor) -> int:
        # With a full window the tensor ends at the last token; else it begins at the first one.
        full = self._seen >= self.sliding_window
        return self._seen if full else super()._end(tensor)

    def _slots(self, length: int, end: int) -> torch.Tensor:
        positions = torch.arange(end - length, end, device=self._memory.keys.device)
        return positions.remainder(self.sliding_window)

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        slots = self._slots(min(self._seen, self.sliding_window - 1), self._seen)
        return memory[: self._residence.rows].index_select(1, slots).transpose(1, 2)

    def _place(self, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        slots = self._slots(tensor.shape[-2], self._end(tensor))
        memory[: tensor.shape[0]].index_copy_(1, slots, tensor.transpose(1, 2))


class KeptStates(LinearAttentionLayer):  # type: ignore[misc]
    """Convolution and recurrent states in the memory, which transformers writes in place."""

    def __init__(self, memory: LayerMemory, residence: Residence, count: int) -> None:
        super().__init__(number_of_states=count)
        self._memory, self._residence = memory, residence

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        super().lazy_initialization(conv_states, recurrent_states, state_idx, conv_kernel_size)
        for states, own_states, memory in (
            (conv_states, self.conv_states, self._memory.conv),
            (recurrent_states, self.recurrent_states, self._memory.recurrent),
        ):
            if states is None:
                continue
            state, memory_state = own_states[state_idx], memory.get(state_idx)
            rows = state.shape[0]
            if (
                memory_state is not None
                and memory_state.dtype is state.dtype
                and memory_state.device == state.device
                and memory_state.shape[1:] == state.shape[1:]
                and self._residence.takes(rows)
            ):
                own_states[state_idx] = memory_state[:rows].zero_()
            else:
                self._residence.leave(_OTHER)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for _, state in _filled(states):
                state.copy_(state.index_select(0, beam_idx.to(state.device)))

    def activate_past_recording(self) -> None:
        # From here on states are replaced by longer ones.
        self._residence.leave(_PAST)
        super().activate_past_recording()

    def stepped(self, tokens: int) -> None:
        """A graph has advanced the states: nothing is counted here."""

    def take_along(self) -> None:
        """Copy the states into tensors of the layer's own."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({index: state.clone() for index, state in _filled(states)})

    def move_in(self, residence: Residence) -> None:
        """Copy the states into the memory."""
        self._residence = residence
        for states, memory in (
            (self.conv_states, self._memory.conv),
            (self.recurrent_states, self._memory.recurrent),
        ):
            for index, state in _filled(states):
                if residence.takes(state.shape[0]):
                    states[index] = memory[index][: state.shape[0]].copy_(state)
                else:
                    residence.leave(_OTHER)


def _filled(states: dict[int, torch.Tensor | None]) -> list[tuple[int, torch.Tensor]]:
    return [(index, state) for index, state in states.items() if state is not None]


class KeptBoth(KeptStates, KeptLayer):
    """Keys, values and states of one layer."""

    def __init__(self, memory: LayerMemory, residence: Residence, count: int) -> None:
        KeptLayer.__init__(self, memory, residence)
        KeptStates.__init__(self, memory, residence, count)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # As for transformers' own layer: keys and values come by position, states by name.
        kind = KeptLayer if args else KeptStates
        kind.lazy_initialization(self, *args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        KeptStates.reorder_cache(self, beam_idx)
        KeptLayer.reorder_cache(self, beam_idx)

    def reset(self) -> None:
        KeptStates.reset(self)
        KeptLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        KeptStates.crop(self, tokens_to_remove)
        KeptLayer.crop(self, tokens_to_remove)

    def stepped(self, tokens: int) -> None:
        KeptLayer.stepped(self, tokens)

    def take_along(self) -> None:
        KeptStates.take_along(self)
        KeptLayer.take_along(self)

    def move_in(self, residence: Residence) -> None:
        KeptStates.move_in(self, residence)
        KeptLayer.move_in(self, residence)


class KeptCache(DynamicCache):  # type: ignore[misc]
    """A cache of one call of `generate`, in the memory that graphs read while it is `attached`."""

    def __init__(self, memory: Memory, *, attached: bool = True) -> None:
        self.memory = memory
        self.residence = Residence(memory.rows, attached)
        layers = [_kept(layer, self.residence) for layer in memory.layers]
        self.residence.layers = layers
        Cache.__init__(self, layers=layers)
        # A layer that counts the tokens; None in a model without keys.
        self.counted = next((each for each in layers if isinstance(each, KeptLayer)), None)

    @property
    def is_compileable(self) -> bool:
        # If it were True, transformers would compile models without keys, and make masks itself.
        return False

    @property
    def attached(self) -> bool:
        """Whether graphs serve it."""
        return self.residence.attached

    @property
    def why_left(self) -> str:
        """Why it is not in the memory."""
        return self.residence.why_left

    @property
    def rows(self) -> int:
        """How many sequences it holds; 0 before the first prompt."""
        return self.residence.rows

    @property
    def seen(self) -> int:
        """How many tokens it holds; 0 in a model without keys."""
        return 0 if self.counted is None else self.counted.get_seq_length()

    def stepped(self, tokens: int) -> None:
        """A graph has written tokens of each row."""
        for layer in self.layers:
            layer.stepped(tokens)

    def detach(self) -> None:
        """Leave the memory, with the tensors."""
        self.residence.leave(TAKEN)

    def attach(self) -> bool:
        """Copy the sequence back into the memory, which no other may use; True if there is room."""
        if not self.attached and self.seen <= self.memory.length:
            residence = Residence(self.memory.rows)
            residence.layers = self.layers
            for layer in self.layers:
                layer.move_in(residence)
            self.residence = residence
        return self.attached

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptCache:
        # The copy has its own tensors, as the memory holds one sequence only.
        copied = copy.copy(self)
        copied.residence = Residence(0, attached=False)
        copied.layers = [_alone(layer, copied.residence) for layer in self.layers]
        copied.counted = next((each for each in copied.layers if isinstance(each, KeptLayer)), None)
        return copied


class KeptPair(EncoderDecoderCache):  # type: ignore[misc]
    """The two caches of a decoder beside an encoder: for its own tokens, and the encoder's."""

    self_attention_cache: KeptCache
    cross_attention_cache: KeptCache

    @property
    def memory(self) -> Memory:
        return self.self_attention_cache.memory

    @property
    def attached(self) -> bool:
        return self.self_attention_cache.attached and self.cross_attention_cache.attached

    @property
    def why_left(self) -> str:
        own, cross = self.self_attention_cache, self.cross_attention_cache
        return cross.why_left if own.attached else own.why_left

    @property
    def rows(self) -> int:
        return self.self_attention_cache.rows

    @property
    def seen(self) -> int:
        return self.self_attention_cache.seen

    @property
    def counted(self) -> KeptLayer | None:
        return self.self_attention_cache.counted

    def stepped(self, tokens: int) -> None:
        self.self_attention_cache.stepped(tokens)

    def detach(self) -> None:
        self.self_attention_cache.detach()
        self.cross_attention_cache.detach()

    def attach(self) -> bool:
        own, cross = self.self_attention_cache.attach(), self.cross_attention_cache.attach()
        return own and cross


Kept = (KeptCache, KeptPair)


def _alone(layer: Any, residence: Residence) -> Any:
    """A copy of a layer that is not in the memory."""
    copied = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(copied, name, dict(value))
    copied.take_along()
    copied._residence = residence
    return copied


def _kept(memory: LayerMemory, residence: Residence) -> Any:
    count = max(len(memory.conv), len(memory.recurrent))
    if memory.has_keys and count:
        return KeptBoth(memory, residence, count)
    if memory.window is not None:
        return KeptWindow(memory, residence, memory.window)
    if memory.has_keys:
        return KeptLayer(memory, residence)
    return KeptStates(memory, residence, max(count, 1))


# The cache inside of graphs --------------------------------------------------------------------


class StepLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of all positions, for a step that writes some tokens of each row."""

    is_compileable = True

    def __init__(
        self, memory: LayerMemory, rows: torch.Tensor, length: torch.Tensor, places: torch.Tensor
    ) -> None:
        """`places` `(tokens,)` are the positions in the memory that the step writes."""
        self._memory, self._rows, self._length, self._places = memory, rows, length, places
        super().__init__()
        self.keys = first_rows(memory.keys, rows.shape[0]).transpose(1, 2)
        self.values = first_rows(memory.values, rows.shape[0]).transpose(1, 2)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("its memory is there")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tensors:
        # Padding writes the last row of the memory, so no live row changes by it.
        for memory, states in (
            (self._memory.keys, key_states),
            (self._memory.values, value_states),
        ):
            write(memory, self._rows, self._places, states.transpose(1, 2))
        return self.keys, self.values

    @property
    def is_sliding(self) -> bool:
        return self._memory.window is not None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # In the mask the columns of a window come behind those of all positions.
        return self.get_max_length(), self._memory.length if self.is_sliding else 0

    def get_seq_length(self) -> Any:
        return self._length[0]

    def get_max_length(self) -> int:
        return int(self._memory.keys.shape[1])


class StepStates(LinearAttentionLayer):  # type: ignore[misc]
    """Convolution and recurrent states, in copies that the forward may write in place.

    Models write all rows at once. In the memory itself, padding would also write rows that may hold
    a sequence at a later step. `write_back` copies row by row.
    """

    def __init__(self, memory: LayerMemory, rows: torch.Tensor, count: int) -> None:
        super().__init__(number_of_states=count)
        self._memory, self._rows = memory, rows
        self._take(self.conv_states, memory.conv, self.is_conv_states_initialized)
        self._take(self.recurrent_states, memory.recurrent, self.is_recurrent_states_initialized)
        self.has_previous_state = dict.fromkeys(range(count), True)
        self.conv_kernel_size.update({index: each.shape[-1] for index, each in memory.conv.items()})

    def _take(
        self, states: dict[int, Any], memory: dict[int, torch.Tensor], initialized: dict[int, bool]
    ) -> None:
        for index, state in memory.items():
            states[index] = state.index_select(0, self._rows)
            initialized[index] = True
            self.dtype, self.device = state.dtype, state.device

    def write_back(self) -> None:
        """Copy the states into the memory; padding's into the last row, which no sequence has."""
        for states, memory in (
            (self.conv_states, self._memory.conv),
            (self.recurrent_states, self._memory.recurrent),
        ):
            for index, state in _filled(states):
                write(memory[index], self._rows, None, state)


class StepBoth(StepLayer, StepStates):
    """Keys, values and states of one layer. Keys come first: states have no length."""

    def __init__(
        self, memory: LayerMemory, rows: torch.Tensor, length: torch.Tensor, count: int
    ) -> None:
        StepLayer.__init__(self, memory, rows, length, length)
        StepStates.__init__(self, memory, rows, count)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("its memory is there")


class _Offset:
    """The position of a step's first token, `length`, which is never 0. transformers asks on the
    host whether it is 0, as in a prompt; with a tensor that question would wait for the device."""

    def __init__(self, length: torch.Tensor) -> None:
        self._length = length

    def __radd__(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self._length


class StepCache(Cache):  # type: ignore[misc]
    """The cache of a captured step: the memory of the rows `(size,)` at full length, of which
    `length` `(1,)` positions hold tokens."""

    def __init__(
        self, memory: Memory, rows: torch.Tensor, length: torch.Tensor, tokens: int = 1
    ) -> None:
        """`tokens` of each row; with a ring it is 1."""
        places = length + torch.arange(tokens, device=length.device) if tokens > 1 else length
        ring = None if memory.window is None else length % memory.window
        super().__init__(layers=[_step(each, rows, length, places, ring) for each in memory.layers])
        self._memory, self._rows, self._length, self._tokens = memory, rows, length, tokens

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        memory = self._memory
        if self._tokens > 1 and not torch.compiler.is_compiling():
            return _Offset(self._length)
        if memory.window is not None and self.is_sliding[layer_idx]:
            # The last column: a step looks at all of the ring.
            return memory.length + memory.window - 1
        return super().get_query_offset(layer_idx)

    def mask(self) -> torch.Tensor:
        """Which positions hold tokens `(size, length)`, followed by which slots of a ring do."""
        memory, length = self._memory, self._length
        mask = first_rows(memory.mask, self._rows.shape[0])
        if memory.window is None:
            return mask
        places = torch.arange(memory.window, device=mask.device)
        positions = length - (length - places) % memory.window
        ring = mask.index_select(1, positions.clamp(min=0)).logical_and(positions >= 0)
        # A row of padding that looks at no position would be NaN.
        padding = (self._rows == memory.rows)[:, None]
        return torch.cat([mask, ring.logical_or(padding).to(mask.dtype)], 1)

    def write_back(self) -> None:
        """Write the states of the step; keys and values are written already."""
        for layer in self.layers:
            if isinstance(layer, StepStates):
                layer.write_back()


class CrossLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of an encoder's outputs, which no step changes."""

    is_compileable = True
    is_sliding = False

    def __init__(self, memory: LayerMemory, size: int) -> None:
        super().__init__()
        self.keys = first_rows(memory.keys, size).transpose(1, 2)
        self.values = first_rows(memory.values, size).transpose(1, 2)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("its memory is there")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Tensors:
        raise AssertionError("steps read what the prompt has written")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        return self.get_max_length()

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class CrossCache(Cache):  # type: ignore[misc]
    """The memory of an encoder's keys and values, for the first rows."""

    def __init__(self, memory: Memory, size: int) -> None:
        super().__init__(layers=[CrossLayer(layer, size) for layer in memory.layers])


def _step(
    memory: LayerMemory,
    rows: torch.Tensor,
    length: torch.Tensor,
    places: torch.Tensor,
    ring: torch.Tensor | None,
) -> Any:
    count = max(len(memory.conv), len(memory.recurrent))
    if memory.has_keys and count:
        return StepBoth(memory, rows, length, count)
    if memory.has_keys:
        if ring is not None and memory.window is not None:
            places = ring
        return StepLayer(memory, rows, length, places)
    return StepStates(memory, rows, max(count, 1))

"""LoRA adapters in one batch: one grouped product for the tokens of all adapters, without merging weights.

An adapter adds ``x A B`` to a product ``x W`` of the model. The A of all resident adapters are stacked, and
so are the B, with zero columns up to the largest rank. The tokens of a step are sorted by adapter, and padded
to the same number of tokens for each adapter:

    x [tokens, in]  →  [adapters, width, in]  @  A [adapters, in, columns]  @  B [adapters, columns, out]
                    →  back to [tokens, out], added to x W

These are two batched products over the adapters from the first to the last one of the step; two plain
products when all tokens have the same adapter; none without adapters. In the model's fused products (queries,
keys and values; gate and up) the B of one part is zero in the outputs of the others.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F

from engine.errors import AdapterNotLoaded, NoAdapterRoom, RequestedAdapterMissing
from engine.memory import tells_of_no_memory
from engine.sequence import AdapterVersion

PRODUCTS = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Stacked adapters. For each layer and product: A [adapters, columns, in] and B [adapters, columns, out];
    B includes the scale.
    """

    layers: tuple[Mapping[str, tuple[torch.Tensor, torch.Tensor]], ...]

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self:
        """Stack single adapters in this order; copies them."""
        layers = zip(*(one.layers for one in weights), strict=True)
        return cls(
            tuple(
                {
                    name: (_stack([one[name][0] for one in layer]), _stack([one[name][1] for one in layer]))
                    for name in PRODUCTS
                }
                for layer in layers
            )
        )

    def only(self, place: int) -> Self:
        """The single adapter at index ``place``; shares the memory."""
        part = slice(place, place + 1)
        return type(self)(
            tuple({name: (a[part], b[part]) for name, (a, b) in layer.items()} for layer in self.layers)
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots [adapters * width] of a step: the token of each slot, the slot of each token (an empty one if
    it has no adapter), and whether each slot is empty, [adapters, width, 1].
    """

    width: int
    tokens: torch.Tensor
    slots: torch.Tensor
    empty: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """The adapters of one step, at ``places`` of ``weights``; no layout if all tokens have the same one."""

    weights: LoraWeights
    places: slice
    layout: Layout | None

    def add_to(self, result: torch.Tensor, x: torch.Tensor, layer: int, product: str) -> None:
        """Add the adapters' product of ``x`` [tokens, in] to ``result`` [tokens, out] in place."""
        a, b = self.weights.layers[layer][product]
        if not a.shape[1]:
            return
        if self.layout is None:
            result.addmm_(F.linear(x, a[self.places.start]), b[self.places.start])
            return
        a, b, layout = a[self.places], b[self.places], self.layout
        laid_out = x.index_select(0, layout.tokens).view(len(a), layout.width, -1)
        inner = torch.bmm(laid_out, a.transpose(1, 2)).masked_fill_(layout.empty, 0.0)
        added = torch.bmm(inner, b).view(-1, result.shape[1])
        result.add_(added.index_select(0, layout.slots))


class AdapterBank:
    """The loaded adapters, and the replaced or removed ones that requests still use.

    ``read`` reads the weights of a folder; it does not access the bank, so another thread may call it. At
    most ``max_loras`` are loaded; together with those still in use there are at most twice as many.
    """

    def __init__(self, max_loras: int, read: Callable[[Path], LoraWeights]) -> None:
        self.read = read
        self._max_loras = max_loras
        self.named: dict[str, AdapterVersion] = {}
        self._places: dict[AdapterVersion, int] = {}
        self._weights = LoraWeights(())
        self._loads = 0

    @property
    def is_empty(self) -> bool:
        return not self._places

    @property
    def has_retired(self) -> bool:
        """True while the bank holds weights of a replaced or removed version."""
        return len(self._places) > len(self.named)

    def version(self, adapter_id: str) -> AdapterVersion:
        """The version that a new request uses. Raises RequestedAdapterMissing."""
        if adapter_id not in self.named:
            raise RequestedAdapterMissing(f"adapter {adapter_id!r} is not loaded")
        return self.named[adapter_id]

    def install(
        self, adapter_id: str, weights: LoraWeights, in_use: Collection[AdapterVersion | None]
    ) -> None:
        """Add an adapter, or replace the one with that id, whose weights are freed unless ``in_use``. Raises
        NoAdapterRoom, and then nothing has changed.
        """
        others = len(self.named.keys() - {adapter_id})
        if others >= self._max_loras or len(self._places) >= 2 * self._max_loras:
            raise NoAdapterRoom(
                f"no room for adapter {adapter_id!r}: {len(self.named)} are loaded and "
                f"{len(self._places) - len(self.named)} removed ones in use; max_loras is {self._max_loras}"
            )
        version = AdapterVersion(adapter_id, self._loads)
        named = {**self.named, adapter_id: version}
        self._arrange({**self._parts({*named.values(), *in_use}), version: weights})
        self._loads += 1
        self.named = named

    def remove(self, adapter_id: str) -> None:
        """Remove an adapter, so that no new request can use it. Raises AdapterNotLoaded."""
        if self.named.pop(adapter_id, None) is None:
            raise AdapterNotLoaded(f"adapter {adapter_id!r} is not loaded")

    def drop_unused(self, in_use: Collection[AdapterVersion | None]) -> None:
        """Free the replaced and removed versions that are not ``in_use``."""
        kept = self._parts({*self.named.values(), *in_use})
        if len(kept) < len(self._places):
            with suppress(NoAdapterRoom):  # they stay; tried again when the next request ends
                self._arrange(kept)

    def batch(
        self, owners: Sequence[AdapterVersion | None], lengths: Sequence[int], device: torch.device
    ) -> LoraBatch | None:
        """The adapters of a step whose first ``lengths[0]`` tokens belong to ``owners[0]``, and so on. None
        when no owner is an adapter.
        """
        places = np.array([-1 if owner is None else self._places[owner] for owner in owners])
        last = int(places.max())
        if last < 0:
            return None
        first = int(places[places >= 0].min())
        span = slice(first, last + 1)
        if places.min() == last:
            return LoraBatch(self._weights, span, None)
        return LoraBatch(self._weights, span, _lay_out(np.repeat(places, lengths) - first, device))

    def _parts(self, wanted: Collection[AdapterVersion | None]) -> dict[AdapterVersion, LoraWeights]:
        return {
            version: self._weights.only(place) for version, place in self._places.items() if version in wanted
        }

    def _arrange(self, parts: Mapping[AdapterVersion, LoraWeights]) -> None:
        with no_room_without_memory(f"to stack {len(parts)} adapters"):
            self._weights = LoraWeights.stack(list(parts.values()))
        self._places = {version: place for place, version in enumerate(parts)}


@contextmanager
def no_room_without_memory(purpose: str) -> Iterator[None]:
    """Turn errors that mean that memory is short into NoAdapterRoom: the requests of the engine continue."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not tells_of_no_memory(error):
            raise
        raise NoAdapterRoom(f"no memory {purpose}: {error}") from error


def _lay_out(adapters: np.ndarray, device: torch.device) -> Layout:
    """The layout for tokens with these adapter indices; negative means no adapter."""
    order = np.argsort(adapters, kind="stable")
    sorted_adapters = adapters[order]
    of_its_kind = np.empty_like(order)
    of_its_kind[order] = np.arange(len(order)) - np.searchsorted(sorted_adapters, sorted_adapters)
    adapted = adapters >= 0
    # One slot more if some tokens have no adapter: they use the first adapter's last slot, which is empty.
    width = int(of_its_kind[adapted].max()) + 1 + int(not adapted.all())
    slots = np.where(adapted, adapters * width + of_its_kind, width - 1)
    count = int(adapters.max()) + 1
    tokens, empty = np.zeros(count * width, dtype=np.int64), np.ones((count, width, 1), dtype=bool)
    tokens[slots[adapted]] = np.flatnonzero(adapted)
    empty.reshape(-1)[slots[adapted]] = False
    return Layout(width, *(torch.from_numpy(one).to(device) for one in (tokens, slots, empty)))


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors [1, columns, …] into one, the columns padded with zeros to the largest number."""
    columns = max(one.shape[1] for one in tensors)
    result = tensors[0].new_zeros(len(tensors), columns, tensors[0].shape[2])
    for place, one in enumerate(tensors):
        result[place, : one.shape[1]] = one[0]
    return result

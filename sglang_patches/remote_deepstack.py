"""Images that go into several layers (Qwen3-VL's "deepstack"): what their encoder says behind each of a few layers of
its own is added to the state behind as many of the decoder's first layers.

The model adds it itself within a run that begins with the embedding, where images are looked at. Behind such a run the
leader does, so that peers get a state as of any model: until nothing is left to be added, a stop is one layer.

::

    images into layers 0 1 2    leader | embedding, 0 | .      .     | 4 ..
                                peers                 | 1 | 2 | 3    |
                                added by the leader  ^   ^   ^
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sglang_patches.remote_pieces import State
from sglang_patches.remote_stops import Stop

_GIVEN: Final = "input_deepstack_embeds"


class SeveralLayers:
    """Of ``decoder``, a part of SGLang's ``model``: what its images say to layers. :attr:`layers` is 0 for a model
    whose images go into the embedding alone."""

    def __init__(self, model: Any, decoder: Any) -> None:
        self.layers = len(model.deepstack_visual_indexes) if getattr(model, "use_deepstack", None) else 0
        self._said: Any = None
        """``[tokens, layers * hidden]``, of the batch under way."""
        self._listens = False
        self._hook = decoder.register_forward_pre_hook(self._hear, with_kwargs=True) if self.layers else None

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _hear(self, decoder: Any, args: Any, named: dict[str, Any]) -> None:
        if self._listens:
            self._said = named.get(_GIVEN)

    def stops(self, route: Sequence[Stop]) -> Iterator[Stop]:
        """``route`` for a batch with images: behind the stop with the embedding, one layer at a time as far as images
        go. While it lasts, what images say is kept for :meth:`added`."""
        self._listens = True
        try:
            for stop in route:
                first = stop.first
                while 0 < first <= self.layers and first + 1 < stop.end:
                    yield Stop(stop.peer, first, first + 1)
                    first += 1
                yield Stop(stop.peer, first, stop.end)
                self._listens = False  # what later runs say of images is nothing
        finally:
            self._listens, self._said = False, None

    def added(self, state: Any, end: int) -> Any:
        """``state`` behind the pieces below ``end``, with what images say to the last of them."""
        layer = end - 2  # piece 0 is the embedding
        if self._said is None or not 0 <= layer < self.layers:
            return state
        hidden, residual = state
        width = hidden.shape[-1]
        said = self._said[:, layer * width : (layer + 1) * width]
        both: State = (hidden + said, None) if residual is None else (hidden, residual + said)
        return both

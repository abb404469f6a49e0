"""What all messages between Prism's processes have in common; which ones there are: :mod:`prism.wire.messages`."""

from __future__ import annotations

from typing import Final

import msgspec

PROTOCOL_VERSION: Final = 5
"""2: instances have parts; commands name them by key. 3: instances may come in execution pipelines. 4: KV follows a
model that moves (:class:`prism.wire.commands.BringKv`). 5: a machine that leaves hands its KV over
(:class:`prism.wire.commands.KvTakers`)."""


class Message(msgspec.Struct, tag=True, tag_field="_", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages; the class name is the tag on the wire (field ``_``)."""

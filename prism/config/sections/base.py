"""What every section of a catalog starts from."""

from __future__ import annotations

from typing import Annotated

import msgspec

Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: unknown keys are errors."""

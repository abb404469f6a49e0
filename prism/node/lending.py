"""What this machine's devices lend each other, as its models allow; told by lender and borrower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prism import memory
from prism.core.ids import DeviceId, ModelName, kind_and_index, local_name
from prism.core.specs import DeviceKind, ModelSpec
from prism.kv.lent_shelf import borrower_of
from prism.policy.profiles import kept_for_bursts


class DeviceLending:
    """The offers of one machine's devices. A device lends what is free beyond the share it keeps, or beyond what bursts
    of the models on it take by their profiles where that is more, unless a model on it is to lend nothing
    (``lending: borrow`` or ``none``)."""

    def __init__(self, accounts: Mapping[DeviceId, memory.Device], keep_fraction: float | None) -> None:
        """``keep_fraction`` None: devices lend nothing."""
        self._accounts, self._keep_fraction = accounts, keep_fraction
        self._offered: dict[DeviceId, int | None] = {}
        self.settle(())

    def settle(self, models: Iterable[tuple[ModelSpec, Sequence[DeviceId]]]) -> None:
        """``models`` are on these devices now: offers begin and end accordingly. What an offer that ends has lent is
        due."""
        here: dict[DeviceId, list[ModelSpec]] = {}
        for spec, devices in models:
            for device in devices:
                here.setdefault(device, []).append(spec)
        for device, account in self._accounts.items():
            specs = here.get(device, ())
            lends = self._keep_fraction is not None and all(spec.lending.lends for spec in specs)
            offer = self._kept_bytes(device, specs) if lends else None
            if device not in self._offered or self._offered[device] != offer:
                account.offer(offer)
                self._offered[device] = offer

    def _kept_bytes(self, device: DeviceId, models: Sequence[ModelSpec]) -> int:
        capacity_bytes = self._accounts[device].capacity_bytes
        bursts = kept_for_bursts(models, DeviceKind(kind_and_index(local_name(device))[0]))
        return min(capacity_bytes, max(int((self._keep_fraction or 0.0) * capacity_bytes), bursts))

    def lent(self) -> dict[DeviceId, dict[str, int]]:
        """By lender and by the borrowing model: bytes."""
        found: dict[DeviceId, dict[str, int]] = {}
        for device, account in self._accounts.items():
            lent = found[device] = {}
            for owner in account.stats().owners:
                if owner.lent_bytes > 0:
                    borrower = borrower_of(owner.name)
                    lent[borrower] = lent.get(borrower, 0) + owner.lent_bytes
        return found

    def borrowed_bytes(self, model: ModelName) -> int:
        """What ``model`` has of all devices' memory together."""
        return sum(lent.get(model, 0) for lent in self.lent().values())

"""What lent memory gives a borrower and costs its lender, on modelled A100s (AQUA, Figures 9, 10, 11 and 12)?

Copies and decode steps are flows over the links of one server (:mod:`prism.sim.kv_links`): PCIe, NVLink, and the
devices' own memory, which a lender's steps and its borrower's copies share. A long prompt's KV (OPT-30B, 8192 tokens,
11 GB) does not fit beside its weights and is read anew in every step, layer after layer beside the computation, from
where engines deal it (:mod:`prism.policy.long_places`): host memory, one lender, or several places at once. Lenders
decode for 32 requests of 1000 tokens. Figure 12: the lender needs its memory from the 60th to the 120th second, when
its traffic doubles.

    python -m benchmarks.kv.lent_model

Results: docs/results/aqua.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from prism.config.sections.machine import KvConfig
from prism.core.specs import ModelShape, ModelSpec
from prism.policy.long_places import deal_round
from prism.policy.moving import lent_rate
from prism.sim.gpus import GpuKind, gpu
from prism.sim.kv_links import KvLinks, KvTier
from prism.sim.links import Network
from prism.sim.models import known_spec
from prism.sim.queue import EventQueue
from prism.sim.roofline import step_cost

A100: Final = gpu("A100")
NETWORK_BYTES_S: Final = 12.5e9
OPT_SHAPE: Final = ModelShape(48, 7168, 56, 56, 128, 28672, 50272)
OPT: Final = replace(
    known_spec("opt", "01-ai/Yi-1.5-34B-Chat", 1.0, 0.1), weight_bytes=60_000_000_000, shape=OPT_SHAPE, path="opt-30b"
)
PROMPT: Final = 8192
KV_BYTES: Final = PROMPT * OPT_SHAPE.kv_bytes_per_token
LENDERS: Final = ("lender", "another")
SECONDS: Final = 20.0
BATCH, CONTEXT = 32, 1000
SHARES: Final = (1.0, KvConfig().lend_rate_fraction)
"""Of the lender's memory bandwidth for who borrows: all that the link carries, and what is lent by default."""


def step_bytes(spec: ModelSpec, batch: int, context: int) -> float:
    """What one device reads in a decode step."""
    shards = spec.tp
    kv_bytes = batch * context * spec.shape.kv_bytes_per_token / shards
    return spec.weight_bytes / shards + kv_bytes


@dataclass(slots=True)
class LentRun:
    """A borrower ("b") and devices of its server that may lend."""

    kind: GpuKind = A100
    lenders: Sequence[str] = ()
    """Who lends to the borrower now; the others and host memory are there all the same."""
    lent_share: float = 1.0
    """Of a lender's memory bandwidth that the borrower may take."""
    queue: EventQueue = field(default_factory=EventQueue)
    borrowed: Counter[int] = field(default_factory=Counter)
    """The borrower's tokens by second."""
    lender_steps: int = 0
    links: KvLinks = field(init=False)
    _parts: int = 0

    def __post_init__(self) -> None:
        devices = ("b", *LENDERS)
        self.links = KvLinks(Network(self.queue), self.kind, devices, NETWORK_BYTES_S, LENDERS, self.lent_share)

    def lend(self, spec: ModelSpec) -> None:
        """The first lender's next step, and all after it."""
        nbytes = step_bytes(spec, BATCH, CONTEXT)

        def done() -> None:
            self.lender_steps += 1
            self.queue.after(self.kind.step_overhead_s, lambda _: self.lend(spec))

        self.links.step(LENDERS[0], nbytes, done)

    def dealt(self) -> Mapping[str, float]:
        """Where the borrower's KV is, and which share of it, as engines deal it."""
        lent = self.lent_share * self.kind.memory_bytes_per_s * self.kind.memory_efficiency
        places = [*self.lenders, KvTier.HOST]
        rates = [lent_rate(self.kind.nvlink_bytes_per_s, lent)] * len(self.lenders)
        dealt = deal_round([*rates, self.kind.pcie_bytes_per_s * self.kind.pcie_efficiency])
        return {places[number]: count / len(dealt) for number, count in Counter(dealt).items()}

    def borrow(self) -> None:
        """The borrower's next step: its weights from its own memory, beside it the KV from where it is."""
        dealt = self.dealt()
        self._parts = 1 + len(dealt)
        self.links.step("b", step_bytes(OPT, 0, 0), self._part_done)
        for place, share in dealt.items():
            self.links.move(place, "b", share * KV_BYTES, self._part_done)

    def _part_done(self) -> None:
        self._parts -= 1
        if not self._parts:
            self.borrowed[int(self.queue.now_s)] += 1
            self.queue.after(self.kind.step_overhead_s, lambda _: self.borrow())


def borrower_rate(lenders: Sequence[str], lent_share: float = 1.0) -> float:
    """Tokens/s."""
    run = LentRun(lenders=lenders, lent_share=lent_share)
    run.borrow()
    run.queue.run_until(SECONDS)
    return sum(run.borrowed.values()) / SECONDS


def lender_step_ms(spec: ModelSpec, lenders: Sequence[str] | None, lent_share: float = 1.0) -> float:
    """The first lender's mean time per token, with a borrower to whom ``lenders`` lend (None: without one)."""
    run = LentRun(lenders=lenders or (), lent_share=lent_share)
    run.lend(spec)
    if lenders is not None:
        run.borrow()
    run.queue.run_until(SECONDS)
    return 1e3 * SECONDS / run.lender_steps


def first_token_s(spec: ModelSpec, tokens: int, place: str, lent_share: float = 1.0) -> float:
    """A request whose cached context comes first, each shard over its own link, and whose prompt adds 128 tokens."""
    queue = EventQueue()
    links = KvLinks(Network(queue), A100, ("b", *LENDERS), NETWORK_BYTES_S, LENDERS, lent_share)
    ended: list[float] = []
    links.move(place, "b", tokens * spec.shape.kv_bytes_per_token / spec.tp, lambda: ended.append(queue.now_s))
    queue.run_until(60.0)
    step_s, _ = step_cost(spec, A100).prefill(128, 128 * (tokens + 64), tokens, 1)
    return ended[0] + step_s


def elastic(spec: ModelSpec, lent_share: float) -> LentRun:
    """Figure 12: the borrower's KV is at the lender but for the minute in which that needs its memory; what leaves is
    copied to host memory and back, and the borrower's steps read from where it is when they begin."""
    lender = LENDERS[0]
    run = LentRun(lenders=(lender,), lent_share=lent_share)
    moved_bytes = run.dealt()[lender] * KV_BYTES
    run.lend(spec)
    run.borrow()

    def settle(*lenders: str) -> None:
        run.lenders = lenders

    run.queue.run_until(60.0)
    run.links.move(lender, KvTier.HOST, moved_bytes, settle)
    run.queue.run_until(120.0)
    run.links.move(KvTier.HOST, lender, moved_bytes, lambda: settle(lender))
    run.queue.run_until(180.0)
    return run


def show_borrower(share: float) -> None:
    yi = known_spec("yi", "01-ai/Yi-1.5-34B-Chat", 1.0, 0.1, 2)
    for tokens in (8_192, 32_768, 131_072):
        host, lender = first_token_s(yi, tokens, KvTier.HOST), first_token_s(yi, tokens, LENDERS[0], share)
        what = f"Yi-34B, 2 GPUs, first token after {tokens} cached tokens, s"
        print(f"| 9a | {share:.0%} | {what} | {host:.3f} | {lender:.3f} | {host / lender:.1f} |")
    host = borrower_rate(())
    for number in range(1, 1 + len(LENDERS)):
        run = LentRun(lenders=LENDERS[:number], lent_share=share)
        rate = borrower_rate(run.lenders, share)
        what = f"OPT-30B, {PROMPT} tokens, tokens/s, over {' and '.join(run.dealt())}"
        print(f"| 9b | {share:.0%} | {what} | {host:.2f} | {rate:.2f} | {rate / host:.2f} |")


def show_lender(figure: str, path: str, tp: int, share: float) -> None:
    spec = known_spec("lender", path, 1.0, 0.1, tp)
    alone = lender_step_ms(spec, None)
    for number in range(1, 1 + len(LENDERS)):
        beside = lender_step_ms(spec, LENDERS[:number], share)
        loss = beside / alone - 1.0
        print(f"| {figure} | {share:.0%} | {number} | {path}, tp {tp} | {alone:.1f} | {beside:.1f} | {loss:.1%} |")


def main() -> None:
    print("| figure | share lent | what | host memory | lent | ratio |\n|---|---|---|---|---|---|")
    for share in SHARES:
        show_borrower(share)
    print("\n| figure | share lent | lenders | lender | alone, ms per token | with a borrower | loss |")
    print("|---|---|---|---|---|---|---|")
    for share in SHARES:
        show_lender("10b", "meta-llama/Llama-3.1-8B-Instruct", 1, share)
        show_lender("11a", "meta-llama/Llama-3.3-70B-Instruct", 4, share)
    print("\n| figure 12, seconds | share lent | " + " | ".join(f"{s}-{s + 20}" for s in range(0, 180, 20)) + " |")
    print("|---|---|" + "---|" * 9)
    for share in SHARES:
        run = elastic(known_spec("lender", "meta-llama/Llama-3.1-8B-Instruct", 1.0, 0.1), share)
        rates = [sum(run.borrowed[t] for t in range(s, s + 20)) / 20 for s in range(0, 180, 20)]
        print(f"| OPT-30B, tokens/s | {share:.0%} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |")


if __name__ == "__main__":
    main()

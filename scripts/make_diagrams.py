"""Draws docs/img/{reception,handover,instance}.svg. A test holds the files to what this makes.

    .venv/bin/python scripts/make_diagrams.py

The reception's schedule is the planner's own, so that the picture cannot say anything else than the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from prism.core.views import InstanceState
from prism.policy.multicast.binomial import binomial

ROOT: Final = Path(__file__).resolve().parents[1]

BLUE, ORANGE, GREEN, RED, GREY = "#3b5bdb", "#e67700", "#2b8a3e", "#c92a2a", "#868e96"
PALE = {BLUE: "#dbe4ff", ORANGE: "#ffe8cc", GREEN: "#d3f9d8", RED: "#ffe3e3", GREY: "#f1f3f5"}
BLOCK_COLOURS = ("#a5d8ff", "#b2f2bb", "#ffec99", "#eebefa")


class Drawing:
    """Collects shapes; coordinates in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, says: str) -> None:
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
            for name, colour in (("dark", "#333"), ("red", RED), ("green", GREEN))
        )
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(says)}"><defs>{heads}</defs>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "#666", dashed: bool = False
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {place} rx="4" fill="{fill}" stroke="{stroke}"{dash}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        colour: str = "#222",
        at: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        style = f'text-anchor="{at}" font-size="{size}" fill="{colour}"{weight}'
        self._parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>')

    def path(self, points: Sequence[tuple[float, float]], head: str = "dark", dashed: bool = False) -> None:
        """A line through ``points``, with an arrow at its end; ``head`` is the marker's name, "" for none."""
        colour = {"dark": "#333", "red": RED, "green": GREEN, "": GREY}[head]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        end = f' marker-end="url(#{head})"' if head else ""
        line = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}{end}/>')

    def svg(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def reception() -> str:
    """Eight hosts, four blocks: what each host gets in which step, and below one host's window on the way."""
    nodes, blocks = 8, 4
    schedule = binomial(nodes, blocks)
    drawing = Drawing(
        900,
        640,
        "Which block reaches which host from whom in which step, and one host's window while its pieces arrive.",
    )
    drawing.text(
        24,
        30,
        f"Binomial pipeline, {nodes} hosts, {blocks} blocks: one send and one receive a step",
        15,
        at="start",
        bold=True,
    )
    left, top, width, height = 130, 74, 118, 30
    for step in range(schedule.steps):
        drawing.text(left + width * step + width / 2, top - 10, f"step {step + 1}", 12, GREY)
    for node in range(nodes):
        y = top + height * node
        drawing.text(24, y + 20, "host 0 (source)" if node == 0 else f"host {node}", at="start")
        for step in range(schedule.steps if node else 0):
            drawing.box(left + width * step + 2, y + 2, width - 4, height - 4, "#fff", "#dee2e6")
    drawing.box(left + 2, top + 2, width * schedule.steps - 4, height - 4, PALE[GREY], "#dee2e6")
    drawing.text(left + 10, top + 20, "holds all four blocks from the start", 12, "#555", "start")
    transfers = zip(schedule.step, schedule.src, schedule.dst, schedule.block, strict=True)
    for step, source, target, block in ((int(a), int(b), int(c), int(d)) for a, b, c, d in transfers):
        x, y = left + width * step, top + height * target
        drawing.box(x + 2, y + 2, width - 4, height - 4, BLOCK_COLOURS[block])
        drawing.text(x + width / 2, y + 20, f"block {block} from {source}", 12)
    _window(drawing, 370)
    return drawing.svg()


def _window(drawing: Drawing, top: float) -> None:
    """A receiver's host copy after its second piece in the plan above."""
    title = "Host 5's copy at the end of step 4: a piece is a block here, of four leaves"
    drawing.text(24, top, title, 15, at="start", bold=True)
    fills = {"v": PALE[GREEN], "c": PALE[ORANGE], "-": "#fff"}
    pieces = (
        ("piece 0", "vvvv", ("an engine reads", "verified leaves in order", "and waits at piece 1")),
        ("piece 1", "----", ("next in the plan:", "host 7 grants one pull", "after the other")),
        ("piece 2", "vvvc", ("all but its last leaf:", "host 7 pulls it already,", "the rest follows")),
        ("piece 3", "----", ("if it is late: from", "whoever has it,", "by the second lane")),
    )
    for i, (name, leaves, words) in enumerate(pieces):
        x = 130 + 178.0 * i
        drawing.text(x + 83, top + 30, name, 12, GREY)
        for k, state in enumerate(leaves):
            drawing.box(x + 42 * k, top + 40, 40, 44, fills[state], dashed=state == "-")
        drawing.path([(x + 83, top + 122), (x + 83, top + 90)], "green")
        for k, line in enumerate(words):
            drawing.text(x + 83, top + 140 + 16 * k, line, 12)
    legend = (("v", "here and verified"), ("c", "bytes coming"), ("-", "missing"))
    for i, (state, line) in enumerate(legend):
        drawing.box(130 + 178 * i, top + 194, 18, 14, fills[state], dashed=state == "-")
        drawing.text(154 + 178 * i, top + 206, line, 12, at="start")
    files = "prism/policy/multicast/binomial.py; prism/transfer/reception.py, pull_lanes.py, grants.py"
    drawing.text(24, top + 244, files, 12, GREY, "start")


LANES: Final = {
    "client": 70,
    "front door": 220,
    "store (queues)": 400,
    "agent A": 560,
    "engine A": 680,
    "agent B": 810,
    "engine B": 930,
}
MESSAGES: Final = (
    ("client", "front door", "POST", "dark"),
    ("front door", "store (queues)", "Submission", "dark"),
    ("store (queues)", "agent A", "read by A: A owns it", "dark"),
    ("agent A", "engine A", "dispatch, attempt 0", "dark"),
    ("engine A", "front door", "Tokens of attempt 0: t0 .. t11", "green"),
    ("front door", "client", "t0 .. t11", "green"),
    ("engine A", "agent A", "its channel ends", "red"),
    ("agent A", "front door", "ResumeQuery: what does the client have?", "dark"),
    ("front door", "agent A", "ResumeReply: attempt 1, t0 .. t11", "dark"),
    ("agent A", "store (queues)", "SendBack, hops + 1", "dark"),
    ("store (queues)", "agent B", "the controller moves it to a device that has the model; read by B", "dark"),
    ("agent B", "front door", "ResumeQuery", "dark"),
    ("front door", "agent B", "ResumeReply: attempt 2, t0 .. t11", "dark"),
    ("agent B", "engine B", "dispatch, attempt 2", "dark"),
    ("engine B", "front door", "Tokens of attempt 2 from index 12: t12 .. t40", "green"),
    ("front door", "client", "t12 .. t40, end", "green"),
    ("agent B", "front door", "Finish: 41 tokens in all", "dark"),
    ("front door", "agent B", "ResumeReply: complete", "dark"),
    ("agent B", "store (queues)", "acknowledged and deleted", "dark"),
)
"""Of the handover: from, to, words, arrow."""


def handover() -> str:
    """A request whose engine dies goes on elsewhere: a sequence diagram."""
    drawing = Drawing(
        1000, 690, "A request's engine dies; another engine continues behind the tokens that the front door has."
    )
    for name, x in LANES.items():
        drawing.box(x - 56, 20, 112, 32, PALE[BLUE] if name == "front door" else PALE[GREY])
        drawing.text(x, 41, name, 13, bold=True)
        drawing.path([(x, 52), (x, 660)], "")
    y = 84.0
    for source, target, words, head in MESSAGES:
        drawing.path([(LANES[source], y), (LANES[target], y)], head)
        middle = (LANES[source] + LANES[target]) / 2
        width = 6.0 * len(words)
        drawing.box(middle - width / 2, y - 19, width, 12, "#fff", "#fff")
        drawing.text(middle, y - 8, words, 11)
        if head == "red":
            drawing.text(LANES["engine A"], y + 5, "X", 18, RED, bold=True)
        y += 30
    drawing.text(
        24,
        680,
        "prism/node/desk.py, prism/node/fronts.py, prism/server/resuming.py, prism/controller/inactive.py",
        12,
        GREY,
        "start",
    )
    return drawing.svg()


STATES: Final = {
    InstanceState.WAITING: ("memory promised,", "no command sent"),
    InstanceState.LOADING: ("weights are loading,", "least KV promised"),
    InstanceState.READY: ("new requests come,", "KV as they need it"),
    InstanceState.DRAINING: ("no new requests,", "those it has go on"),
}
"""What is true of an instance in each state."""
EDGES: Final[tuple[tuple[tuple[tuple[float, float], ...], str, bool, tuple[float, float, str, str]], ...]] = (
    (((110, 70), (110, 130)), "dark", False, (34, 60, "a model is wanted, and there is room", "start")),
    (((110, 206), (110, 325), (390, 325)), "dark", False, (122, 318, "told to leave: nothing was sent", "start")),
    (((350, 206), (350, 270), (430, 270), (430, 300)), "red", False, (342, 250, "ActivationFailed, or lost", "end")),
    (((590, 206), (590, 270), (510, 270), (510, 300)), "red", False, (598, 250, "InstanceLost", "start")),
    (((830, 206), (830, 325), (550, 325)), "dark", False, (818, 318, "DeactivationFinished, or lost", "end")),
    (
        ((350, 130), (350, 96), (830, 96), (830, 130)),
        "dark",
        True,
        (590, 88, "told to leave while it still loads", "middle"),
    ),
)
"""Other changes: points of the line, arrow, dashed, and where its words stand."""


def instance() -> str:
    """The states of an instance and what moves it from one to the next."""
    drawing = Drawing(940, 400, "States of an instance: waiting for room, activating, active, draining, gone.")
    for i, (state, holds) in enumerate(STATES.items()):
        x = 34.0 + 240 * i
        drawing.box(x, 130, 152, 76, PALE[GREEN] if state is InstanceState.READY else PALE[BLUE], BLUE)
        drawing.text(x + 76, 154, state.value.replace("_", " "), 14, bold=True)
        for line, words in enumerate(holds):
            drawing.text(x + 76, 176 + 16 * line, words, 12, "#555")
    for i, (over, under) in enumerate(
        (("the victims", "have left"), ("Activation-", "Finished"), ("told to", "leave"))
    ):
        drawing.path([(186 + 240 * i, 168), (274 + 240 * i, 168)])
        drawing.text(230 + 240 * i, 160, over, 12)
        drawing.text(230 + 240 * i, 184, under, 12)
    drawing.box(390, 300, 160, 50, PALE[GREY], GREY)
    drawing.text(470, 322, "gone", 14, bold=True)
    drawing.text(470, 340, "its promise is free", 12, "#555")
    for points, head, dashed, (x, y, words, at) in EDGES:
        drawing.path(points, head, dashed)
        drawing.text(x, y, words, 12, RED if head == "red" else "#222", at)
    files = "prism/core/views.py (the states), prism/scheduler/lifecycle.py (who changes them)"
    drawing.text(24, 385, files, 12, GREY, "start")
    return drawing.svg()


DIAGRAMS: Final = {"reception": reception, "handover": handover, "instance": instance}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (ROOT / "docs" / "img" / f"{name}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()

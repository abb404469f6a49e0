"""Completely fair scheduling on a model of an engine: nobody waits for more than its share, nothing is left unused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.fair import (
    MOST_TURN_TOKENS,
    ROUND_STEPS,
    FairBatch,
    FairRequest,
    FairRoom,
    ReturnSteps,
    ServiceBook,
    Switch,
    UsualAnswer,
    expected_left,
    paging_pays,
    plan_round,
    turn_tokens,
)


def decoding(id: str, service: int, kv: int = 100, resident: bool = True, left_out: int = 0) -> FairRequest:
    return FairRequest(id, service, kv, 0, resident, left_out)


def prompt(id: str, service: int, tokens: int, kv: int = 100, left_out: int = 0) -> FairRequest:
    return FairRequest(id, service, kv, tokens, False, left_out)


def test_the_papers_example_takes_turns() -> None:
    """Figure 6: five requests, room for three. A newcomer is prefilled, and who has most makes room for it."""
    room = FairRoom(memory_tokens=300, batch_tokens=512, most_requests=100)
    running = [decoding("A", 30), decoding("B", 20), decoding("C", 10)]
    assert plan_round(running, room).members == {"A", "B", "C"}
    batch = plan_round([*running, prompt("D", 0, 80)], room)
    assert batch == FairBatch(("C", "B"), ("D",))
    away = decoding("A", 30, resident=False)
    assert plan_round([away, decoding("B", 31), decoding("C", 21), decoding("D", 10)], room).decoding == ("C", "D", "A")


def test_a_turn_is_not_cut_short_but_for_first_tokens() -> None:
    room = FairRoom(memory_tokens=200, batch_tokens=64, most_requests=100, turn_tokens=50)
    waits = decoding("w", 100, resident=False)
    assert plan_round([waits, decoding("a", 150), decoding("b", 110)], room).decoding == ("a", "b")
    assert plan_round([waits, decoding("a", 151), decoding("b", 111)], room).decoding == ("b", "w"), "a had its turn"
    batch = plan_round([waits, decoding("a", 150), decoding("b", 110), prompt("p", 0, 40)], room)
    assert batch == FairBatch(("a",), ("p",)), "whose turn began last makes room"


def test_whose_kv_is_largest_makes_room_for_prompts() -> None:
    """One leaves; where who is furthest in its turn stayed, two left."""
    room = FairRoom(memory_tokens=450, batch_tokens=512, most_requests=100, turn_tokens=50)
    running = [decoding("long", 20, 200), *(decoding(id, i, 50) for i, id in enumerate("abc"))]
    assert plan_round([*running, prompt("p", 0, 180, 200)], room) == FairBatch(("c", "b", "a"), ("p",))


def test_who_comes_back_waits_for_a_step_of_prompts_or_as_long_as_its_own_holds_up_others() -> None:
    returns = ReturnSteps()
    assert [returns.due(1, 4, prompts=False) for _ in range(4)] == [False, False, False, True]
    assert not returns.due(3, 4, prompts=False) and returns.due(3, 4, prompts=True)
    assert not returns.due(3, 4, prompts=False), "it began anew"
    assert not returns.due(0, 4, prompts=True) and not returns.due(3, 4, prompts=False)
    assert returns.due(1, 0, prompts=False), "nobody is held up"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans()), max_size=60))
def test_who_comes_back_waits_for_no_more_steps_than_others_run(steps: list[tuple[int, int, bool]]) -> None:
    returns, waited = ReturnSteps(), 0
    for returning, running, prompts in steps:
        due = returns.due(returning, running, prompts)
        assert due or not prompts or not returning
        waited = 0 if due or not returning else waited + 1
        assert waited <= running


def test_a_turn_is_twice_a_usual_answer_or_what_its_copies_are_worth() -> None:
    assert turn_tokens(0.0, 0.0, 0.01) == turn_tokens(2.0, 0.004, 0.01) == turn_tokens(0.0, 1.0, 0.0) == ROUND_STEPS
    assert turn_tokens(40.2, 0.004, 0.01) == 81
    assert turn_tokens(40.2, 0.1, 0.01) == 100, "a tenth of them"
    assert turn_tokens(435.0, 0.004, 0.01) == 870, "ShareGPT's mean: nine of ten answers end within a turn"
    assert turn_tokens(4000.0, 0.1, 0.01) == MOST_TURN_TOKENS


def test_a_turn_is_not_cut_short_by_the_share_of_who_waits() -> None:
    room = FairRoom(memory_tokens=100, batch_tokens=64, most_requests=100, turn_tokens=50)
    runs, rounds = decoding("a", 30), 50 // ROUND_STEPS
    assert plan_round([runs, decoding("w", 0, resident=False, left_out=2 + rounds - 1)], room).decoding == ("a",)
    assert plan_round([runs, decoding("w", 0, resident=False, left_out=2 + rounds)], room).decoding == ("w",)


def test_an_answer_that_is_longer_than_usual_is_not_taken_to_end_at_once() -> None:
    """It was: while such a one was in, no newcomer was ever let in before it."""
    assert expected_left(30, 1000, 100.0) == 70
    assert expected_left(250, 1000, 100.0) == 250
    assert expected_left(900, 1000, 100.0) == 100, "no more than was asked for"
    assert expected_left(40, 300, 0.0) == 260, "nothing has ended yet"
    assert expected_left(300, 300, 100.0) == 1


def test_answers_that_still_run_count_in_what_is_usual() -> None:
    """Of four of 100 and four of 900 that began together the short ones have ended."""
    usual = UsualAnswer()
    assert usual.tokens(50) == 0.0, "nothing has ended yet"
    for _ in range(4):
        usual.note(100)
    assert usual.tokens(0) == pytest.approx(100.0) and usual.tokens(4 * 300) == pytest.approx(400.0, rel=0.05)
    for _ in range(400):
        usual.note(20)
    assert usual.tokens(0) == pytest.approx(20.0, abs=0.5), "what was long ago is forgotten"


def test_prompts_fill_what_decoding_leaves_of_the_batch() -> None:
    room = FairRoom(memory_tokens=1000, batch_tokens=64, most_requests=100)
    first, second, third = prompt("p", 0, 40), prompt("q", 8, 40), prompt("r", 16, 40)
    assert plan_round([third, second, first], room).prefilling == ("p", "q"), "least prefilled first, until p is full"
    many = [decoding("a", 5), *(prompt(f"p{i}", 0, 18) for i in range(9))]
    assert len(plan_round(many, room).prefilling) == 4, (
        "54 tokens are p; the slots of d that nobody decodes in are more"
    )
    few = FairRoom(memory_tokens=250, batch_tokens=64, most_requests=100)
    assert plan_round([decoding("a", 5), first, second, third], few).prefilling == ("p", "q")


def test_between_equals_who_is_in_stays_and_then_who_came_first() -> None:
    room = FairRoom(memory_tokens=200, batch_tokens=64, most_requests=100)
    out = [decoding(id, 7, resident=False) for id in "ab"]
    assert plan_round([*out, decoding("c", 7)], room).decoding == ("c", "a")


def test_a_newcomer_starts_at_the_least_service_present() -> None:
    book = ServiceBook()
    book.enter([("a", True, 40), ("b", True, 0)])
    assert [book.service("a", True, 50), book.service("b", True, 10)] == [10, 10], "both began at once"
    book.enter([("a", True, 50), ("b", True, 30), ("c", True, 0)])
    assert book.service("c", True, 0) == 10 and book.service("b", True, 30) == 30
    book.enter([("b", True, 30), ("d", False, 0)])
    book.enter([("a", True, 50), ("b", True, 30), ("d", False, 60), ("e", False, 0)])
    assert book.service("a", True, 50) == 30, "who went and comes back is new"
    assert book.service("e", False, 0) == 60, "prompts are counted by themselves"


def test_paging_that_costs_more_than_it_gains_is_not_done() -> None:
    switch = Switch(copy_s=0.1, delayed=10, entering=2, wait_s=0.51)
    assert paging_pays(switch)
    assert not paging_pays(Switch(0.1, 10, 2, 0.5)), "short answers"
    assert not paging_pays(Switch(0.2, 10, 2, 0.51)), "a slow link"
    assert not paging_pays(Switch(0.0, 10, 0, 1.0)), "nobody enters"


request_lists = st.lists(
    st.builds(
        FairRequest,
        st.uuids().map(str),
        st.integers(0, 200),
        st.integers(1, 120),
        st.sampled_from([0, 0, 1, 40, 300]),
        st.booleans(),
        st.integers(0, 30),
    ),
    max_size=12,
    unique_by=lambda r: r.id,
)
turns = st.sampled_from([0, 12, 60])
rooms = st.builds(FairRoom, st.integers(100, 400), st.sampled_from([8, 64, 512]), st.integers(1, 8), turns)


@given(requests=request_lists, room=rooms)
def test_a_batch_fits_and_leaves_nothing_that_would(requests: list[FairRequest], room: FairRoom) -> None:
    batch = plan_round(requests, room)
    by_id = {r.id: r for r in requests}
    assert len(batch.decoding) + len(batch.prefilling) == len(batch.members) <= room.most_requests
    left = room.memory_tokens - sum(by_id[id].kv_tokens for id in batch.members)
    assert left >= 0
    assert all(by_id[id].decodes for id in batch.decoding) and not any(by_id[id].decodes for id in batch.prefilling)
    full = len(batch.members) == room.most_requests
    prompt_tokens = sum(by_id[id].prompt_tokens for id in batch.prefilling)
    for r in requests:
        if r.id not in batch.members and not full:
            no_tokens = len(batch.decoding) if r.decodes else prompt_tokens + len(batch.decoding)
            assert r.kv_tokens > left or no_tokens >= room.batch_tokens - 1, "work conserving"
    fitting = [r for r in requests if r.kv_tokens <= room.memory_tokens]
    assert not fitting or batch.members


@dataclass
class Served:
    """A request of the model below."""

    prompt: int
    answer: int
    prefilled: int = 0
    generated: int = 0
    held: bool = False
    missed: int = 0


class Engine:
    """Rounds of an engine as the policy sees it; nothing but tokens."""

    def __init__(self, room: FairRoom) -> None:
        self.room, self.book = room, ServiceBook()
        self.requests: dict[str, Served] = {}
        self.most_present = 0

    def round(self) -> None:
        self.most_present = max(self.most_present, len(self.requests))
        phases = {id: r.prefilled == r.prompt for id, r in self.requests.items()}
        given = {id: r.generated if phases[id] else r.prefilled for id, r in self.requests.items()}
        self.book.enter([(id, phases[id], given[id]) for id in self.requests])
        views = [self.view(id, phases[id], given[id]) for id in self.requests]
        batch = plan_round(views, self.room)
        self.book.note_round(self.requests, batch)
        assert sum(v.kv_tokens for v in views if v.id in batch.members) <= self.room.memory_tokens
        assert batch.members or not views, "whoever is here fits alone, so somebody is served"
        self.serve(batch)

    def view(self, id: str, decodes: bool, given: int) -> FairRequest:
        r = self.requests[id]
        kv = r.prompt + r.generated + (ROUND_STEPS if decodes else 0)
        service = self.book.service(id, decodes, given)
        return FairRequest(id, service, kv, r.prompt - r.prefilled, r.held, self.book.left_out(id))

    def serve(self, batch: FairBatch) -> None:
        tokens = ROUND_STEPS * max(1, self.room.batch_tokens - len(batch.decoding))
        for id, r in self.requests.items():
            r.held = id in batch.members
            r.missed = 0 if r.held else r.missed + 1
            most = 2 * self.most_present + self.room.turn_tokens // ROUND_STEPS
            assert r.missed <= most, "nobody waits for more than its share"
        for id in batch.prefilling:
            r = self.requests[id]
            more = min(tokens, r.prompt - r.prefilled)
            r.prefilled, tokens = r.prefilled + more, tokens - more
        for id in batch.decoding:
            self.requests[id].generated += ROUND_STEPS
        self.requests = {id: r for id, r in self.requests.items() if r.generated < r.answer}


arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=30
)  # rounds since the one before, prompt, answer


@settings(deadline=None)
@given(
    coming=arrivals,
    room=st.builds(FairRoom, st.integers(160, 400), st.sampled_from([8, 64]), st.integers(1, 6), turns),
)
def test_nobody_starves(coming: list[tuple[int, int, int]], room: FairRoom) -> None:
    engine = Engine(room)
    for number, (rounds, prompt_tokens, answer) in enumerate(coming):
        for _ in range(rounds):
            engine.round()
        engine.requests[str(number)] = Served(prompt_tokens, answer)
    most_rounds = 4 * len(coming) * (2 * len(coming) + sum(p + a for _, p, a in coming))
    for _ in range(most_rounds):
        if not engine.requests:
            return
        engine.round()
    raise AssertionError(f"{len(engine.requests)} requests never ended")


@pytest.mark.parametrize("turn", [0, 15])
def test_those_who_began_together_get_alike(turn: int) -> None:
    """Six of one length, room for two: nobody ever has more than a turn and two rounds more than anybody else."""
    engine = Engine(FairRoom(memory_tokens=130, batch_tokens=64, most_requests=8, turn_tokens=turn))
    engine.requests = {str(i): Served(prompt=20, answer=40, prefilled=20) for i in range(6)}
    for _ in range(18):
        engine.round()
        generated = [r.generated for r in engine.requests.values()]
        assert not generated or max(generated) - min(generated) <= 2 * ROUND_STEPS + turn


def test_a_stream_of_newcomers_does_not_hold_up_who_decodes() -> None:
    """The paper's order alone would prefill for ever: each prompt takes all memory."""
    engine = Engine(FairRoom(memory_tokens=100, batch_tokens=8, most_requests=8))
    engine.requests["old"] = Served(prompt=20, answer=60, prefilled=20)
    for number in range(400):
        if number % 4 == 0:
            engine.requests[f"new-{number}"] = Served(prompt=90, answer=5)
        engine.round()
        if "old" not in engine.requests:
            return
    raise AssertionError("starved")

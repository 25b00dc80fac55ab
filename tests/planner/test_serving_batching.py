"""Continuous batching: small cases computed by hand, and laws that hold of any."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from planner.serving.batching import ServedRequests, simulate_serving
from planner.serving.search import LatencyTarget, serve_search
from planner.serving.setup import (
    ENGINES,
    AnswerReserve,
    CacheAccount,
    Engine,
    Lengths,
    Mixing,
    Requests,
    ServingError,
    ServingSetup,
)
from planner.serving.step_grids import PrefillChunk

BARE = dataclasses.replace(ENGINES["vllm"], request_us=0.0, reply_us=0.0, step_us=0.0, sequence_us=0.0, chunk=100)
ROOMY = CacheAccount(1e9, 0.0, 0.0, 1e9, 0.0, 1.0, 1)


class Plain:
    """Steps of 100 µs, and 1 for each sequence and each token of a prompt."""

    def us(self, sequences: float, context: float, pieces: Sequence[PrefillChunk] = (), finished: float = 0.0) -> float:
        return 100.0 + sequences + sum(piece.prompts * piece.new for piece in pieces)


def served(load: Requests, engine: Engine = BARE, cache: CacheAccount = ROOMY) -> ServedRequests:
    return simulate_serving(load, ServingSetup(engine=engine), Plain(), cache)


def lengths(tokens: int) -> Lengths:
    return Lengths(tokens, tokens)


def test_two_clients_by_hand() -> None:
    # Step 1 reads both prompts: 100 + 2 · 10. Steps 2 and 3 decode both: 102 each.
    got = served(Requests(lengths(10), lengths(3), 2, count=2))
    assert (got.ttft_us.tolist(), got.tpot_us.tolist(), got.end_us.tolist()) == ([120.0] * 2, [102.0] * 2, [324.0] * 2)
    assert got.makespan_us == 324.0


def test_clients_that_ask_for_one_length_do_not_stay_in_step() -> None:
    together = Requests(Lengths(100, 100), Lengths(500, 500), 20, count=240, warm_up=20)
    apart = dataclasses.replace(together, apart=True)
    got, spread = (served(load, dataclasses.replace(BARE, chunk=1 << 20)) for load in (together, apart))
    assert set(got.ttft_us.tolist()) == {100.0 + 20 * 100.0}
    assert spread.mean_ttft_us() < 0.25 * got.mean_ttft_us()
    assert spread.output.min() >= 490 and spread.output.max() <= 510
    assert spread.output.mean() == pytest.approx(500, rel=0.005)
    assert set(dataclasses.replace(apart, output=Lengths(7, 7)).drawn()[2]) == {7}


def test_a_prompt_is_read_in_pieces_beside_what_decodes() -> None:
    # 150 tokens in steps of 100: the second request waits for the rest of the first.
    # Step 1: 100 of A. Step 2: 50 of A, 50 of B. Step 3: decode A beside 99 of B. Step 4: A ends, the last of B.
    got = served(Requests(lengths(150), lengths(3), 2, count=2))
    assert got.ttft_us.tolist() == [400.0, 400.0 + 200.0 + 102.0]
    assert got.tpot_us[0] == pytest.approx((200.0 + 102.0) / 2)


def test_prompts_wait_for_others_beside_what_decodes() -> None:
    # Three clients, two of which ask again after 3 tokens: they come together, and wait for the third or two steps.
    load = Requests(lengths(10), lengths(9), rate=1e6 / 250, count=2, seed=5)
    arrivals = load.drawn()[0]
    gathering = dataclasses.replace(BARE, wait_tokens=50.0, wait_steps=3)
    plain, waited = served(load), served(load, gathering)
    # The first finds nothing decoding and is read at once; the second waits for three steps of 101 µs.
    assert waited.ttft_us[0] == plain.ttft_us[0] == pytest.approx(110.0)
    assert arrivals[1] > 110.0 and waited.ttft_us[1] == pytest.approx(plain.ttft_us[1] + 3 * 101.0)
    # With as many tokens as are waited for they start at once.
    assert np.allclose(served(load, dataclasses.replace(gathering, wait_tokens=10.0)).ttft_us, plain.ttft_us)


def test_a_first_message_of_several_tokens_comes_with_the_last_of_them() -> None:
    plain = served(Requests(lengths(10), lengths(5), 2, count=2))
    held = served(Requests(lengths(10), lengths(5), 2, count=2), dataclasses.replace(BARE, first_tokens=3))
    assert np.allclose(held.ttft_us, plain.ttft_us + 2 * 102.0)
    assert np.allclose(held.end_us, plain.end_us)
    assert np.allclose(held.tpot_us, plain.tpot_us / 2)  # what is left over all of the answer's tokens but one
    whole = served(Requests(lengths(10), lengths(5), 2, count=2), dataclasses.replace(BARE, first_tokens=30))
    assert np.allclose(whole.ttft_us, plain.end_us)


def test_prefill_first_lets_what_decodes_wait() -> None:
    first = dataclasses.replace(BARE, mixing=Mixing.PREFILL_FIRST)
    # A is read (150), B comes with it; both decode; as A's and B's answers end, C and D are read together.
    got = served(Requests(lengths(50), lengths(2), 2, count=4), first)
    assert (got.ttft_us.tolist(), got.tpot_us.tolist()) == ([200.0] * 4, [102.0] * 4)
    assert got.makespan_us == pytest.approx(2 * 302.0)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("load", [
    Requests(Lengths(20, 200), Lengths(1, 60), 16, count=200),
    Requests(Lengths(100, 100, 0.7), Lengths(30, 30, 0.7), rate=2000.0, count=300, seed=1)])
def test_little_s_law_and_what_every_simulation_keeps(engine: str, load: Requests) -> None:
    got = served(load, dataclasses.replace(ENGINES[engine], chunk=256))
    decoding = (got.end_us - got.ttft_us).sum()  # µs in which each sequence decodes
    clock = got.makespan_us + got.arrival_us.min()
    assert got.running * clock == pytest.approx(decoding, rel=0.02)
    assert got.in_flight == pytest.approx(got.requests_per_second * 1e-6 * got.end_us.mean())
    assert (got.ttft_us > 0).all() and (got.end_us >= got.ttft_us).all()
    assert 0 < got.busy <= 1.0001
    if load.concurrency:
        assert got.in_flight <= load.concurrency * 1.1


def test_a_full_cache_throws_sequences_out_and_all_are_answered() -> None:
    tight = dataclasses.replace(ROOMY, room=300.0)
    load = Requests(lengths(20), lengths(100), 8, count=16)
    got = served(load, cache=tight)
    assert got.preempted > 0 and np.isfinite(got.end_us).all()
    reserved, roomy = served(load, dataclasses.replace(BARE, reserves=True), tight), served(load)
    assert reserved.preempted == 0 and reserved.running <= 300 / 120
    assert roomy.makespan_us < got.makespan_us < reserved.makespan_us * 1.5
    assert roomy.mean_ttft_us() < reserved.mean_ttft_us()
    # Room that is kept for a share of the answers' rest.
    whole, some, four = (served(load, dataclasses.replace(BARE, reserve=AnswerReserve(*kept)), tight) for kept in (
        (1.0, 1.0, 1, 4096, 0), (0.3, 0.3, 1, 4096, 0), (1.0, 1.0, 1, 4, 0)))
    assert whole.preempted == 0 and whole.running <= 300 / 120
    assert whole.preempted < some.preempted < got.preempted and four.preempted > 0


def test_the_front_takes_requests_one_after_another() -> None:
    front = dataclasses.replace(BARE, request_us=1000.0)
    got = served(Requests(lengths(10), lengths(2), 3, count=3), front)
    assert got.ttft_us.tolist() == pytest.approx([1110.0, 2110.0, 3110.0])


@pytest.mark.parametrize(("call", "says"), [
    *((lambda text=text: Lengths.parse(text, "--prompt"), "--prompt")
      for text in ("", "x", "0", "10-5", "1~99", "-1", "1e9")),
    *((lambda text=text: LatencyTarget.parse(text), "no target")
      for text in ("", "ttft", "ttft=0", "tpot=5,tpot=6", "e2e=3")),
    (lambda: Requests(lengths(80), lengths(3), 2, count=4, cached=-1), "prompts share"),
    (lambda: served(Requests(lengths(400), lengths(1), 1, count=1), cache=dataclasses.replace(ROOMY, room=300.0)),
     "the largest batch is 0")])
def test_what_cannot_be_served_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ServingError, match=says):
        call()


def test_lengths_are_drawn_as_they_say() -> None:
    random = np.random.default_rng(0)
    assert set(Lengths.parse("7", "x").draw(5, random)) == {7}
    uniform = Lengths.parse("100-200", "x").draw(2000, random)
    assert uniform.min() == 100 and uniform.max() == 200
    gamma = Lengths.parse("1000~0.5", "x").draw(20_000, random)
    assert gamma.mean() == pytest.approx(1000, rel=0.03) and gamma.std() == pytest.approx(500, rel=0.05)


def test_the_search_finds_what_meets_the_target_best() -> None:
    found = serve_search("llama-3.1-8b", 4, target="ttft=400,tpot=15", device="h100-sxm", prompt=512, output=128)
    assert found.choices and found.tried > 10
    rows = found.rows()
    assert all(row["ttft_ms"] <= 400 and row["tpot_ms"] <= 15 for row in rows)
    throughput = [row["tokens_per_second"] for row in rows]
    assert throughput == sorted(throughput, reverse=True)
    assert all(row["gpus"] == 4 for row in rows)
    strict = serve_search("llama-3.1-8b", 4, target="tpot=6", device="h100-sxm", prompt=512, output=128)
    assert strict.choices[0].tokens_per_second < found.choices[0].tokens_per_second
    assert not serve_search("llama-3.1-8b", 4, target="tpot=0.5", device="h100-sxm", prompt=512, output=128).choices


def test_a_rate_is_searched_for_the_split_that_keeps_up() -> None:
    found = serve_search("llama-3.1-8b", 2, rate=4.0, device="h100-sxm", prompt=512, output=128)
    assert [row["tpot_ms"] for row in found.rows()] == sorted(row["tpot_ms"] for row in found.rows())
    assert not serve_search("llama-3.1-8b", 1, rate=5000.0, device="h100-sxm", prompt=512, output=128).choices


def test_percentiles_of_a_queue_are_those_of_its_law() -> None:
    # One prompt a step of 200 µs, at random half of the time: M/D/1, whose waiting times Erlang (1909) gives.
    load = Requests(lengths(100), lengths(1), rate=2500.0, count=20_000, seed=3)
    waits = served(load).ttft_us - 200.0

    def waited_less(us: float, service: float = 200.0, busy: float = 0.5) -> float:
        left = [busy / service * (k * service - us) for k in range(int(us // service) + 1)]
        return (1 - busy) * sum(each ** k / math.factorial(k) * math.exp(-each) for k, each in enumerate(left))

    assert waits.mean() == pytest.approx(0.5 * 200 / 2 / (1 - 0.5), rel=0.05)
    for at in (50, 90, 99):
        assert waited_less(float(np.percentile(waits, at))) == pytest.approx(max(at / 100, 0.5), abs=0.01)


def test_a_prefix_that_is_cached_is_not_read_again_and_held_once() -> None:
    load = Requests(lengths(80), lengths(3), 2, count=4)
    shared = served(dataclasses.replace(load, cached=70))
    assert shared.ttft_us.tolist() == served(Requests(lengths(10), lengths(3), 2, count=4)).ttft_us.tolist()
    assert served(dataclasses.replace(load, cached=500)).ttft_us.min() == 102.0  # the last token is read all the same
    # 70 tokens for all and 13 of each fit, four times 83 do not.
    tight, four = dataclasses.replace(ROOMY, room=130.0), Requests(lengths(80), lengths(3), 4, count=8)
    assert served(four, cache=tight).running < 2.0
    assert served(dataclasses.replace(four, cached=70), cache=tight).makespan_us < served(four, cache=tight).makespan_us

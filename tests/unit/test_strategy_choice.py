"""The choice of rule, codec and round, over the networks that bench/wan.py emulates and some that it does not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from w5xde_async.codecs.registry import codec
from w5xde_async.plan.strategy_choice import (
    CODECS,
    LADDER,
    PAIRS,
    Choice,
    Figures,
    Situation,
    Targets,
    choose,
    predict,
)

GPT_VALUES = 10_900_000


def worker(megabits: float, round_trip_ms: float, batch_s: float = 0.33) -> Figures:
    rate = megabits * 1e6 / 8
    return Figures(batch_s=batch_s, up_bytes_s=rate, down_bytes_s=rate, round_trip_s=round_trip_ms / 1e3)


def situation(*workers: Figures, num_values: int = GPT_VALUES, num_layers: int = 8) -> Situation:
    return Situation(num_values=num_values, batch_bytes=4096, num_layers=num_layers, workers=workers)


def gentleness(choice: Choice) -> int:
    return LADDER.index((choice.update, choice.codec, choice.inner_steps))


#: Two workers share the coordinator's line: each gets half of it.
NETWORKS = {
    "loopback": situation(*[worker(16000, 0.1)] * 2),
    "10000/1": situation(*[worker(5000, 1)] * 2),
    "1000/10": situation(*[worker(500, 10)] * 2),
    "100/40": situation(*[worker(50, 40)] * 2),
    "20/100": situation(*[worker(10, 100)] * 2),
    "unequal": situation(worker(50, 40), worker(20, 100)),
}


def test_what_is_chosen_for_which_network() -> None:
    chosen = {name: choose(network) for name, network in NETWORKS.items()}
    assert {name: choice.update for name, choice in chosen.items()} == {
        "loopback": "sync", "10000/1": "local", "1000/10": "local", "100/40": "streaming", "20/100": "streaming",
        "unequal": "streaming",
    }  # fmt: skip
    assert chosen["loopback"].codec == "raw"
    order = ["loopback", "10000/1", "1000/10", "100/40", "20/100"]
    given_up = [gentleness(chosen[name]) for name in order]
    assert given_up == sorted(given_up)
    for choice in chosen.values():
        assert choice.utilization >= (0.6 if choice.codec == "raw" else 0.9)
        assert (choice.fragments > 1) == (choice.update == "streaming")
        assert (choice.delay > 0) == (choice.update == "streaming")


def test_nothing_gentler_would_have_reached_the_target() -> None:
    network = NETWORKS["100/40"]
    choice = choose(network)
    for less in range(10, 51, 10):
        lower = choose(network, Targets(computing=choice.utilization - less / 100))
        assert gentleness(lower) <= gentleness(choice)
    assert gentleness(choose(network, Targets(computing=0.4))) < gentleness(choice)


def test_the_prediction_is_the_arithmetic() -> None:
    """100 Mbit/s, one worker: 4 bytes up and down for each of 10^6 values take 0.64 s, a batch 0.32 s."""
    one = situation(worker(100, 0, batch_s=0.32), num_values=1_000_000, num_layers=1)
    exact = choose(one, Targets(exact=0.3))
    assert (exact.update, exact.codec) == ("sync", "raw")
    assert exact.utilization == pytest.approx(0.32 / (0.32 + 0.64))
    rounds = choose(one)
    assert (rounds.update, rounds.codec, rounds.inner_steps) == ("local", "bf16", 10)
    assert rounds.utilization == pytest.approx(3.2 / (3.2 + 0.32 + 2 * 0.7e-3))


def test_exact_where_the_network_costs_nothing_worth_speaking_of() -> None:
    """A tiny model on a local network computes a small part of the time, and local steps would gain milliseconds."""
    tiny = situation(*[worker(1000, 0.3, batch_s=1e-4)] * 2, num_values=430)
    assert (choose(tiny).update, choose(tiny).codec) == ("sync", "raw")
    assert choose(tiny, Targets(negligible_s=0.0)).update != "sync"


def test_a_model_of_one_layer_is_not_streamed_and_a_hopeless_link_gets_the_best_there_is() -> None:
    assert choose(replace(NETWORKS["20/100"], num_layers=1)).update == "local"
    hopeless = choose(situation(*[worker(0.01, 100)] * 2))
    assert hopeless.utilization < 0.9
    assert hopeless.inner_steps == 500


def test_the_slowest_worker_decides() -> None:
    assert choose(NETWORKS["unequal"]).utilization <= choose(situation(worker(50, 40))).utilization
    slow = choose(situation(*[worker(50, 40)] * 7, worker(1, 40)))
    assert gentleness(slow) > gentleness(choose(situation(*[worker(50, 40)] * 8)))


def test_leases_are_sent_ahead_by_the_round_trip_and_by_the_fragment_before_them() -> None:
    assert choose(situation(worker(1e5, 0))).leases_ahead == 2
    assert choose(situation(worker(1e5, 500, batch_s=0.1))).leases_ahead == 7
    assert choose(situation(worker(1e5, 500, batch_s=1e-4))).leases_ahead == 64
    streamed = choose(NETWORKS["20/100"])
    down = CODECS[streamed.codec].value_bytes if streamed.downlink == streamed.codec else CODECS["int8"].value_bytes
    fragment_s = 2 * GPT_VALUES * down / streamed.fragments / (10e6 / 8)
    assert fragment_s > 0.33
    assert streamed.leases_ahead == 1 + math.ceil((0.1 + fragment_s + 4096 / (10e6 / 8)) / 0.33) > 2


def test_reasons_are_sentences_with_figures() -> None:
    for network in NETWORKS.values():
        reason = choose(network).reason
        assert "compute" in reason or "exact sync" in reason
    assert choose(NETWORKS["100/40"]).reason.startswith("rounds of ")
    assert "%" in choose(NETWORKS["100/40"]).reason


def test_codec_costs_are_those_of_the_codecs() -> None:
    for name, cost in CODECS.items():
        assert codec(name).encoded_nbytes(1 << 20) / (1 << 20) == pytest.approx(cost.value_bytes, rel=1e-3)
    assert {name for _, name, _ in LADDER} <= CODECS.keys()


def test_figures_that_cannot_be_are_refused() -> None:
    for wrong in ({"batch_s": 0.0}, {"up_bytes_s": 0.0}, {"round_trip_s": -1.0}, {"down_bytes_s": float("nan")}):
        with pytest.raises(ValueError, match="above 0"):
            Figures(**{"batch_s": 1.0, "up_bytes_s": 1.0, "down_bytes_s": 1.0, "round_trip_s": 0.0, **wrong})
    with pytest.raises(ValueError, match="workers"):
        situation()


def test_only_what_is_possible_is_chosen() -> None:
    network = NETWORKS["100/40"]
    assert choose(network).update == "streaming"
    without = choose(network, possible={pair for pair in PAIRS if pair[0] != "streaming"})
    assert without.update == "local"
    few = choose(network, possible={("sync", "int8")})
    assert (few.update, few.codec) == ("sync", "int8")
    none = choose(network, possible=set())
    assert (none.update, none.codec) == ("sync", "raw")
    assert "nothing better fits this job" in none.reason


def test_the_documents_table_has_what_is_chosen() -> None:
    """docs/slow-links.md: 10.9M parameters, two workers, a fifth of a second for an own step, buckets of 4 MiB."""
    networks = [
        (worker(16000, 0.1, 0.2),) * 2, (worker(500, 10, 0.2),) * 2, (worker(50, 40, 0.2),) * 2,
        (worker(10, 100, 0.2),) * 2, (worker(50, 40, 0.2), worker(20, 100, 0.2)),
    ]  # fmt: skip
    chosen = []
    for workers in networks:
        choice = choose(situation(*workers, num_layers=11))
        said = f"{choice.update}, {choice.codec}" + (f", {choice.inner_steps}" if choice.inner_steps else "")
        if choice.fragments > 1:
            said += f", {choice.fragments} fragments, overlap {choice.delay}, {choice.leases_ahead} leases"
        chosen.append(said)
    text = (Path(__file__).parents[2] / "docs" / "slow-links.md").read_text()
    table = text[text.index("| because | auto |") :].split("\n\n")[0].splitlines()[2:]
    told = [line.split(" | ")[-1].removesuffix("|").strip() for line in table]
    assert told == [*chosen, ""]  # nothing is said of unequal machines on good lines


def test_one_slow_line_is_not_what_everybody_waits_for() -> None:
    """Exact sync goes on without it, as the scheduler does."""
    fast, slow = worker(1000, 1, 0.2), worker(0.1, 50, 0.2)
    alone = predict(situation(fast, num_values=20_000), "sync", "raw", 0)
    both = predict(situation(fast, slow, num_values=20_000), "sync", "raw", 0)
    assert both.utilization == pytest.approx(alone.utilization / 2)  # the other computes nothing


@pytest.mark.parametrize("steps_left", [1, 10, 50, 200, 1000, 10_000])
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_rounds_are_no_longer_than_a_quarter_of_what_is_left(network: Situation, steps_left: int) -> None:
    choice = choose(replace(network, steps_left=steps_left))
    assert choice.inner_steps * len(network.workers) * 4 <= steps_left

"""/metrics: what Prometheus' own parser reads, under names that its conventions allow."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.support.events import FINISHED, STARTED, committed, joined, left, reported, run_reported

from w5xde_async.telemetry import metrics
from w5xde_async.telemetry.events import CheckpointFailed, CheckpointSaved, Evaluated, JournalFailed, ResultHeld
from w5xde_async.telemetry.metrics import Metrics

EVENTS = [
    replace(STARTED, durability="journal"), joined("a"), joined("b"), committed(1, seconds=0.02),
    committed(2, seconds=3.0, skipped=True, staleness=1.5, metrics={"accuracy": 0.25}),
    Evaluated(step=2, metrics={"accuracy": 0.5}, seconds=0.1),
    CheckpointSaved(step=2, path="p", nbytes=77, pause_s=0.1, seconds=0.2),
    CheckpointFailed(step=3, reason="full"), JournalFailed(step=3, reason="full", seconds=1.0),
    ResultHeld(worker_id="a", name="name-a", step=2, why="norm"),
    reported("a", 1.0, compute_s=0.5, rtt_s=0.002, flops_per_leaf=1e6), reported("b", 1.0),
    run_reported(leaves=8, leaves_in_vain=2, leases_stale=1, refused=5, residuals_lost=3, downlink_raw_bytes=400,
                 downlink_encoded_bytes=100), left("b"),
]  # fmt: skip
#: Base units, and what stands without one: counts, ratios, numbers of a step.
UNITS = ("_seconds", "_bytes", "_info", "_per_second")


def filled() -> Metrics:
    made = Metrics()
    for event in EVENTS:
        made(event)
    return made


def values(of: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(of.text().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_what_the_step_returned():
    made = Metrics()
    made(STARTED)
    assert ("w5xde_step_metric", (("metric", "accuracy"),)) not in values(made)
    made(committed(1, metrics={"accuracy": 0.5, "only once": 1.0}))
    made(committed(2, metrics={"accuracy": 0.75}))
    found = values(made)
    assert found["w5xde_step_metric", (("metric", "accuracy"),)] == 0.75
    assert ("w5xde_step_metric", (("metric", "only once"),)) not in found


def test_a_rate_that_is_not_known_is_no_figure():
    made = Metrics()
    made(STARTED)
    made(committed(1))
    assert ("w5xde_learning_rate", ()) in values(made)
    made(committed(2, learning_rate=None))
    assert ("w5xde_learning_rate", ()) not in values(made)


def test_figures():
    found = values(filled())
    assert found["w5xde_steps_total", ()] == 2
    assert found["w5xde_steps_skipped_total", ()] == 1
    assert found["w5xde_samples_total", ()] == 20
    assert found["w5xde_step_duration_seconds_count", ()] == 2
    assert found["w5xde_step_duration_seconds_sum", ()] == 3.02
    assert found["w5xde_step_duration_seconds_bucket", (("le", "0.025"),)] == 1
    assert found["w5xde_step_phase_seconds_total", (("phase", "wait"),)] == 0.16
    assert found["w5xde_evaluation", (("metric", "accuracy"),)] == 0.5
    assert found["w5xde_checkpoint_size_bytes", ()] == 77
    assert found["w5xde_checkpoint_failures_total", ()] == 1
    assert found["w5xde_leaves_total", (("outcome", "in_vain"),)] == 2
    assert found["w5xde_leases_refused_total", (("verdict", "stale"),)] == 1
    assert found["w5xde_journal_up", ()] == 0
    assert found["w5xde_residuals_lost_total", ()] == 3
    assert found["w5xde_links_refused_total", ()] == 5
    assert found["w5xde_downlink_raw_bytes_total", ()] == 4 * found["w5xde_downlink_encoded_bytes_total", ()]
    assert found["w5xde_results_held_total", (("why", "norm"),)] == 1
    assert found["w5xde_workers_left_total", (("how", "lost"),)] == 1
    assert found["w5xde_worker_compute_seconds_total", (("id", "a"), ("worker", "name-a"))] == 0.5
    assert found["w5xde_worker_flops_per_second", (("id", "a"), ("worker", "name-a"))] == 2e6
    assert ("w5xde_worker_leaves_total", (("id", "b"), ("worker", "name-b"))) not in found  # it has left


def test_an_evaluation_takes_the_place_of_the_one_before():
    made = Metrics()
    for name in ("old", "new"):
        made(Evaluated(step=1, metrics={name: 1.0}, seconds=0.1))
    assert [labels for name, labels in values(made) if name == "w5xde_evaluation"] == [(("metric", "new"),)]


def test_names_that_are_no_utf8_keep_no_other_figure_away():
    made = Metrics()
    made(replace(STARTED, run_name="caf\udce9"))
    made(committed(1, metrics={"a\ud800": 0.5}))
    made(Evaluated(step=1, metrics={"b\ud800": 1.0}, seconds=0.1))
    found = values(made)
    assert found["w5xde_step_metric", (("metric", "a?"),)] == 0.5
    assert found["w5xde_evaluation", (("metric", "b?"),)] == 1.0


def test_names_and_types_keep_the_conventions():
    families = list(text_string_to_metric_families(filled().text().decode()))
    assert len(families) > 40
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert re.fullmatch(r"w5xde_[a-z0-9_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        for word in ("_ms", "_milliseconds", "_kb", "_mb", "_minutes", "_s"):
            assert not family.name.endswith(word), family.name
        for sample in family.samples:
            assert (sample.name.endswith("_total")) == (family.type == "counter"), sample.name
    timed = [name for name in names if re.search(r"seconds|duration", name)]
    assert all(name.endswith(UNITS) for name in timed)


def test_a_run_that_has_not_begun_and_one_that_has_ended():
    assert b"w5xde_steps_total 0.0" in Metrics().text()
    run = filled()
    run(FINISHED)
    assert values(run)["w5xde_run_finished", ()] == 1


def test_two_in_one_process_do_not_meet():
    one, other = filled(), Metrics()
    assert values(one)["w5xde_steps_total", ()] == 2
    assert values(other)["w5xde_steps_total", ()] == 0


def test_who_fails_while_it_joins_leaves_no_series():
    run = filled()
    sizes = set()
    for number in range(20):
        for event in (reported("a", 2.0), reported(f"try-{number}", 1.0, state="joining"), run_reported()):
            run(event)
        sizes.add(len(values(run)))
    assert len(sizes) == 1
    run(joined("try-19"))
    run(reported("try-19", 2.0))
    run(run_reported())
    run(run_reported())
    ids = {dict(labels).get("id") for _, labels in values(run)}
    assert {"a", "try-19"} <= ids
    assert "try-18" not in ids


def test_the_page_lists_them_all():
    """With their labels; and no name stands in the code that the events above do not lead to."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(w5xde_\w+)` \| (\w+) \| ([^|]*?) \|", text, re.MULTILINE)
    found = []
    for family in text_string_to_metric_families(filled().text().decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        found.append((name, family.type, "run, run_id, ..." if name == "w5xde_run_info" else ", ".join(labels)))
    assert sorted((name, kind, labels.strip()) for name, kind, labels in documented) == sorted(found)
    named = re.findall(r'_(?:gauge|counter)\("(\w+)"', Path(metrics.__file__).read_text(encoding="utf-8"))
    assert len(named) > 20
    assert {f"w5xde_{name}" for name in named} <= {name.removesuffix("_total") for name, _, _ in found}

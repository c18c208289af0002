"""``USED_BY`` says of every setting of the update rules which of them use it."""

from __future__ import annotations

import re
from dataclasses import fields

from w5xde_async.config import setting_of
from w5xde_async.updates.config import RULES, USED_BY, UpdateConfig


def test_every_setting_is_in_the_table() -> None:
    assert set(USED_BY) == {one.name for one in fields(UpdateConfig)}
    assert all(rules and set(rules) <= set(RULES) for rules in USED_BY.values())
    for one in fields(UpdateConfig):
        told = setting_of(one)
        assert told is not None
        # ``CoordinatorSettings.without_effect`` finds them by these names.
        assert told.flag == ("update" if one.name == "rule" else "")


def test_the_help_and_the_table_name_the_same_rules() -> None:
    for one in fields(UpdateConfig):
        told = setting_of(one)
        assert told is not None
        if found := re.match(r"([a-z-]+(?:, [a-z-]+)*): ", told.meaning):
            named = set(found[1].split(", "))
            if named <= set(RULES):
                extra = {"async-local"} if one.name == "results_per_step" else set()  # told behind a semicolon
                assert set(USED_BY[one.name]) == named | extra

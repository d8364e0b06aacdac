"""Counted instructions are compared with the figures in the repository."""

import json
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = runpy.run_path(str(BENCHMARKS / "instructions.py"))
HERE = {"python": "3.11", "libc": "2", "valgrind": "3", "machine": "x86_64", "numpy": "2.4"}


def compare(count, figure, name="ints-process loop", **other):
    figures = {} if figure is None else {name: figure}
    kept = {"taken_with": HERE, "figures": figures}
    return list(PROGRAM["compare"]({name: count}, {**HERE, **other}, kept))


def remarks(compared, **other):
    return " ".join(PROGRAM["remarks"](compared, {**HERE, **other}, HERE))


@pytest.mark.parametrize(
    ("count", "verdict", "fails"),
    [
        (1000, "ok", False),
        (1050, "ok", False),
        (1051, "above", True),
        (950, "ok", False),
        (949, "below", False),
    ],
)
def test_only_more_than_5_percent_above_fails(count, verdict, fails):
    compared = compare(count, 1000)
    assert [(one.verdict, one.fails) for one in compared] == [(verdict, fails)]
    said = remarks(compared)
    assert ("FAILED" in said, "below" in said) == (fails, verdict == "below")


def test_a_missing_figure_fails():
    compared = compare(1000, None)
    assert [(one.verdict, one.fails) for one in compared] == [("no figure", True)]
    assert "has no figure of ints-process loop" in remarks(compared)


@pytest.mark.parametrize("other", [{"python": "3.12"}, {"valgrind": "4"}, {"machine": "arm64"}])
def test_other_versions_are_named_and_do_not_fail(other):
    compared = compare(9000, 1000, **other)
    assert [(one.verdict, one.fails) for one in compared] == [("other versions", False)]
    (name,) = other
    assert f"({name} {other[name]} instead of {HERE[name]})" in remarks(compared, **other)


def test_another_numpy_concerns_only_cases_that_use_it():
    assert compare(9000, 1000, numpy="3").pop().fails
    assert not compare(9000, 1000, "tiny-process worker", numpy="3").pop().fails


@pytest.mark.parametrize(("count", "kept"), [(13_649.7, 13_600), (295_730_111, 296_000_000)])
def test_a_figure_leaves_out_the_noise(count, kept):
    assert PROGRAM["rounded"](count) == kept


def test_every_case_has_a_figure():
    kept = json.loads((BENCHMARKS / "instructions.json").read_text())
    parts = {case: PROGRAM["parts"](case) for case in PROGRAM["CASES"]}
    names = {f"{case} {part}".strip() for case, these in parts.items() for part in these}
    assert set(kept["figures"]) == names
    assert set(kept["taken_with"]) == set(HERE)

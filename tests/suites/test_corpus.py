"""The corpus of torch's regressions: what its cases state, its page, and the judgement of its edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from bumpgate.core.rows import Judgement, Row, Verdict, write_record
from suites.features.corpus import CASES, edges
from suites.features.corpus.case import Case


def edge() -> list[str]:
    """Title."""
    return []


EDGE = Case("area", 1, ("2.9.0", "2.10.0"), ("2.8.0", "2.13.0"), "", edge)


def record(path: Path, version: str, value: int, case: Case = EDGE) -> str:
    """Write a complete lane record of one release with the row of one case."""
    known = int(Requirement(case.known_in).specifier.contains(version))
    row = Row(
        case.row, value, "present", 1, "R1", at_most=known, better="defect", evidence=(f"known {known}",)
    )
    verdict = Verdict.REGRESSION if value > known else Verdict.PASS
    write_record(path, {"lane": "cpu", "torch": version}, [Judgement(row, verdict, "")])
    return str(path)


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "CASES", [EDGE])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stated_releases_agree_with_the_range(case: Case) -> None:
    known = Requirement(case.known_in).specifier
    assert case.bad
    assert case.good
    for stated in (case.bad, case.good):
        assert list(stated) == sorted(set(stated), key=Version)
    assert [v for v in (*case.bad, *case.good) if known.contains(v)] == list(case.bad)


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("bad", "good", "range"),
    [
        ("2.9.0", "2.8.0 2.13.0", "torch>=2.9.0,<2.13.0"),
        ("2.15.0", "2.13.0 2.14.1", "torch>=2.15.0,<2.16"),
        ("2.9.0 2.12.0", "2.10.0 2.13.0", "torch>=2.9.0,<2.13.0,!=2.10.0"),
    ],
)
def test_range_of_bad_releases(bad: str, good: str, range: str) -> None:
    assert replace(EDGE, bad=tuple(bad.split()), good=tuple(good.split())).known_in == range


def test_another_failure_is_not_the_signature() -> None:
    def fails() -> list[str]:
        raise RuntimeError("the named error, and more")

    assert replace(EDGE, error="named error", find=fails).signature() == ["RuntimeError: named error"]
    for words in ("", "another error"):
        with pytest.raises(RuntimeError, match="named error"):
            replace(EDGE, error=words, find=fails).signature()


@pytest.mark.usefixtures("one_case")
def test_each_pair_of_releases_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"2.8.0": 0, "2.9.0": 1, "2.13.0": 0}
    paths = [record(tmp_path / f"{version}.json", version, value) for version, value in values.items()]
    assert edges.main(paths) == 0
    assert capsys.readouterr().out.splitlines() == [
        "HOLD    area-edge: 2.8.0 -> 2.9.0",
        "HOLD    area-edge: 2.13.0 -> 2.9.0",
        "2 of 2 pairs hold",
    ]


@pytest.mark.usefixtures("one_case")
def test_absent_signature_misses_the_edge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [record(tmp_path / f"{version}.json", version, 0) for version in ("2.9.0", "2.13.0")]
    assert edges.main(paths) == 1
    assert capsys.readouterr().out.splitlines() == [
        "MISSED  area-edge: 2.13.0 -> 2.9.0",
        "area-edge: 0 in the record of 2.9.0, stated 1",
        "0 of 1 pairs hold",
    ]


def test_unusable_record_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torn.json").write_text("{", encoding="utf-8")
    assert edges.main([str(tmp_path / "torn.json")]) == 2
    assert capsys.readouterr().err.startswith("edges: ")


def test_every_edge_is_bisected_in_the_widest_search_with_one_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = replace(EDGE, bad=("2.9.0", "2.10.0"), good=("2.7.0", "2.8.0", "2.13.0", "2.14.1"))
    monkeypatch.setattr(edges, "CASES", [case])
    assert edges.main(["--bisects", "/envs"]) == 0
    start = "bumpgate bisect --lane cpu --environments /envs"
    test = "-- 'suites/features/test_corpus.py::test_regression[area-edge-cpu]' -n 0"
    assert capsys.readouterr().out.splitlines() == [
        f"{start} --good 2.7.0 --bad 2.10.0 {test}  # 2.8.0 -> 2.9.0",
        f"{start} --good 2.14.1 --bad 2.9.0 --find-fix {test}  # 2.10.0 -> 2.13.0",
    ]

"""The pure parts of a bisect: the range between two endpoints, deciding rows, sources of two environments."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bumpgate.bisect import blame, suite_probe
from bumpgate.bisect.answer import Watcher
from bumpgate.bisect.attribution import Mixture, attribute, changes
from bumpgate.bisect.candidates import Range, RangeError, between, needs_prereleases
from bumpgate.bisect.prefetch import Prefetch
from bumpgate.bisect.probe import Cause, ProbeResult, Reading
from bumpgate.bisect.search import Outcome
from bumpgate.bisect.suite_probe import Signals, SuiteTest
from bumpgate.core.problems import Problem
from bumpgate.core.rows import Judgement, Row, Verdict, write_record
from bumpgate.env.build import Environment, build
from bumpgate.env.request import Request
from bumpgate.env.versions import Found
from tests.support.builds import make_builds
from tests.support.local_index import LocalIndex, isolated
from tests.support.searching import mutant_of

DAY = date(2026, 10, 1)


def found(*versions: str, day: date | None = DAY, **fields: Any) -> list[Found]:
    """Return one build per day."""
    days = [day and day + timedelta(n) for n in range(len(versions))]
    return [Found(v, d, fields.get("yanked"), "", "", fields.get("note", "")) for v, d in zip(versions, days)]


NIGHTS = found(
    *(f"2.14.0.dev2026100{n}+cpu" for n in (1, 2, 3)), *(f"2.14.0.dev2026100{n}+cpu" for n in (5, 7))
)
NIGHTS[3:] = [Found(f.version, DAY + timedelta(n), None, "") for f, n in zip(NIGHTS[3:], (4, 6))]


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        ("2026-10-02", "2026-10-05", ["02", "03", "05"]),
        ("2026-10-04", "2026-10-06", ["03", "05", "07"]),
        ("2.14.0.dev20261001", "2026-10-03", ["01", "02", "03"]),
        ("2.14.0.dev20261001+cpu", "2.14.0.dev20261007+cpu", ["01", "02", "03", "05", "07"]),
    ],
    ids=str,
)
def test_date_endpoint_never_narrows_the_range(good: str, bad: str, expected: list[str]) -> None:
    """For a night without a build, the range is never narrower than requested."""
    span = between("torch", NIGHTS, good, bad)
    assert [v.removesuffix("+cpu")[-2:] for v in span.versions] == expected
    assert (span.good, span.bad) == (span.versions[0], span.versions[-1])


def test_range_summary_counts_excluded_versions() -> None:
    listed = [*NIGHTS]
    listed[1] = Found(listed[1].version, listed[1].date, "broken", "")
    assert between("torch", listed, "2026-10-01", "2026-10-07").summary(6) == (
        "torch: 2 versions between 2.14.0.dev20261001+cpu (good) and 2.14.0.dev20261007+cpu (bad),"
        " about 6 probes if all install and none misreads;"
        " left out: 1 yanked (2.14.0.dev20261002+cpu), 3 days without a build"
    )


def test_yanked_endpoint_is_kept() -> None:
    listed = found("2.0.0", "2.1.0", "2.2.0", yanked="all of them")
    assert between("torch", listed, "2.0.0", "2.2.0").versions == ("2.0.0", "2.2.0")


@pytest.mark.parametrize(
    ("listed", "good", "bad", "words"),
    [
        (
            found("2.0.0", "2.1.0", day=None),
            "2026-10-01",
            "2.1.0",
            "no version here has a date: name versions",
        ),
        (
            NIGHTS,
            "2026-10-01",
            "2026-10-08",
            "no build of 2026-10-08 or later; the newest is 2.14.0.dev20261007",
        ),
        (found("2.0.0+cpu", "2.0.0+cu126"), "2.0.0", "2.0.0+cpu", "are one version"),
        (
            found("2.0.0+cu126", "2.0.0+xpu", "2.1.0+cu126"),
            "2.0.0",
            "2.1.0",
            "comes as 2.0.0+cu126, 2.0.0+xpu",
        ),
        (
            found("2.0.0", "2.1.0+a1", "2.1.0+a2", "2.2.0"),
            "2.0.0",
            "2.2.0",
            "comes in variants (2.1.0+a1, 2.1.0+a2)",
        ),
        (found("2.0.0+cpu", "2.1.0+xpu"), "2.0.0+cpu", "2.1.0+xpu", "two variants, cpu and xpu"),
        (
            found("3.6.0+git1111111", "3.6.0+git2222222", note="its place is not known"),
            "3.6.0+git1111111",
            "3.6.0+git2222222",
            "name an index that gives upload times",
        ),
        (
            found("2.0.0", "2.2.0"),
            "2.0.0",
            "2.1.0",
            "2.1.0 is not among the 2 versions here; next to it: 2.0.0, 2.2.0",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_invalid_endpoints_are_refused_in_one_line(
    listed: list[Found], good: str, bad: str, words: str
) -> None:
    with pytest.raises(RangeError) as caught:
        between("torch", listed, good, bad)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_variants_of_a_version_are_excluded() -> None:
    listed = found("2.0.0", "2.1.0+cpu", "2.1.0", "2.2.0+cpu", "2.3.0")
    plain = between("torch", [listed[0], listed[2], listed[1], listed[4]], "2.0.0", "2.3.0")
    assert plain.versions == ("2.0.0", "2.1.0", "2.3.0")
    assert between("torch", listed, "2.0.0", "2.2.0+cpu").versions == ("2.0.0", "2.1.0+cpu", "2.2.0+cpu")


def test_commit_builds_are_ordered_by_date() -> None:
    listed = found("3.6.0+gitf000000", "3.6.0+git1111111", "3.6.0+git0000000")
    span = between("triton", listed, "3.6.0+gitf000000", "3.6.0+git0000000")
    assert span.versions == tuple(f.version for f in listed)


def test_release_range_needs_no_prereleases() -> None:
    assert not needs_prereleases("2.9.0", "2.13.0")
    assert needs_prereleases("2.9.0", "2026-10-01")
    assert needs_prereleases("2.9.0", "2.14.0.dev20261001")


# Outcome of a suite's reading.


def row(case: str, verdict: Verdict, *, better: str = "exact", gone: bool = False) -> Judgement:
    row_id = f"compile/{case}/graph_breaks"
    if gone:
        return Judgement(Row(row_id, None, "n", 0, "", test=f"t.py::{case}"), verdict, "not reported")
    expected = {"expected": 1} if better == "derived" else {}
    made = Row(row_id, 1, "n", 1, "C6", better=better, test=f"t.py::{case}", **expected)  # type: ignore[arg-type]
    return Judgement(made, verdict, "")


class Readings:
    """Creates readings of suites in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module: Any = suite_probe
        self.made = 0

    def __call__(
        self,
        *rows: Judgement,
        problems: Iterable[str] = (),
        complete: bool = True,
        failure: str = "",
        code: int = 1,
        **fields: Any,
    ) -> Reading:
        self.made += 1
        place = self.folder / str(self.made)
        place.mkdir()
        write_record(
            place / "record.json",
            {"lane": "cpu"},
            rows,
            complete=complete,
            problems=map(Problem.from_json, problems),
        )
        return self.module.Reading(place, self.module.Cause[fields.get("cause", "RAN")], code, failure)


@pytest.fixture
def reading(tmp_path: Path) -> Readings:
    return Readings(tmp_path)


GREEN, RED = Verdict.PASS, Verdict.REGRESSION


def suite(module: Any, reading: Readings) -> Any:
    """A suite of two endpoints: `model` is red at the bad one, `old` at both, `fixed` at the good one."""
    made = module.SuiteTest(Path(), "cpu", (), "torch")
    good = reading(row("model", GREEN), row("old", RED), row("fixed", RED))
    bad = reading(
        row("model", Verdict.CHANGED), row("old", RED), row("fixed", GREEN), problems=["t.py::x: raised"]
    )
    made.learn([good], [bad])
    return made


def check_what_decides(module: Any, reading: Readings) -> None:
    reading.module = module
    test = suite(module, reading)
    assert test.deciding == ("compile/model/graph_breaks", "t.py::x")
    cases = {
        "all green": reading(row("model", GREEN), row("old", RED)),
        "another fault": reading(row("model", GREEN), row("old", GREEN), row("new", RED)),
        "the row": reading(row("model", RED)),
        "the test": reading(row("model", GREEN), problems=["t.py::x: raised otherwise"]),
        "the row is lost": reading(row("model", Verdict.MISSING, gone=True)),
        "the row is lost, the test is red": reading(
            row("model", Verdict.MISSING, gone=True), problems=["t.py::x: raised"]
        ),
        "the test raises another type": reading(
            row("model", GREEN), problems=["t.py::x: ImportError: libcudart.so.13 (at suites/a.py:3)"]
        ),
        "its test was skipped": reading(
            row("model", Verdict.MISSING, gone=True),
            problems=["t.py::model: skipped under --gate: old torch"],
        ),
        "too noisy": reading(row("model", Verdict.INCONCLUSIVE)),
        "its instrument broke": reading(row("model", Verdict.INSTRUMENT)),
        "cut short": reading(row("model", GREEN), complete=False, problems=["the run was cut short: 1 of 2"]),
        "cut short and red": reading(row("model", RED), complete=False),
        "not collected": reading(complete=False, problems=["t.py: could not be collected: AttributeError"]),
        "does not import": reading(cause="BROKEN", failure="import torch: killed by SIGSEGV"),
    }
    outcomes = {name: test.judge(r).outcome.value for name, r in cases.items()}
    assert outcomes == {
        "all green": "GOOD",
        "another fault": "GOOD",
        "the row": "BAD",
        "the test": "BAD",
        "the row is lost": "OTHER",
        "the row is lost, the test is red": "BAD",
        "the test raises another type": "OTHER",
        "its test was skipped": "SKIP",
        "too noisy": "UNKNOWN",
        "its instrument broke": "SKIP",
        "cut short": "UNKNOWN",
        "cut short and red": "BAD",
        "not collected": "SKIP",
        "does not import": "SKIP",
    }


def test_suite_probe_decides_by_rows_red_only_at_bad_end(reading: Readings) -> None:
    check_what_decides(suite_probe, reading)
    # An unchanged copy of the module passes: the faults below are not detected because of the copy.
    check_what_decides(mutant_of(suite_probe, 'THE_RUN = "the run"', 'THE_RUN = "the run"'), reading)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if at_good[name] < at_bad[name])", "if at_bad[name])"),
        ("if seen.kinds[name] in self.kinds[name]]", "]"),
        (
            "        if not reading.whole:\n            return _cut_short(reading)\n        unread",
            "        unread",
        ),
        ("and j.row.test not in skipped", ""),
        ("if state is not Verdict.PASS]", "if state is Verdict.REGRESSION]"),
    ],
    ids=[
        "red at both ends counts",
        "another fault counts",
        "a cut run is green",
        "a skip is red",
        "what was not read is green",
    ],
)
def test_mutant_of_suite_probe_is_caught(old: str, new: str, reading: Readings) -> None:
    mutant = mutant_of(suite_probe, old, new)
    with pytest.raises(AssertionError):
        check_what_decides(mutant, reading)


def test_endpoints_without_difference_are_judged_alike(reading: Readings) -> None:
    for good, bad, expected in (
        ([row("a", GREEN)], [row("a", GREEN)], ("GOOD", "GOOD")),
        ([row("a", RED)], [row("a", RED)], ("BAD", "BAD")),
        ([row("a", RED), row("b", RED)], [row("a", GREEN), row("b", RED)], ("BAD", "GOOD")),
    ):
        test = SuiteTest(Path(), "cpu", (), "torch")
        ends = reading(*good), reading(*bad)
        test.learn([ends[0]], [ends[1]])
        assert tuple(test.judge(end).outcome.value for end in ends) == expected


def test_unreviewed_derived_row_is_green(reading: Readings) -> None:
    """Its expected value comes from the layer pattern, not from the baseline."""
    seen = reading(row("a", Verdict.MISSING, better="derived"), row("b", Verdict.MISSING))
    assert Signals(seen).verdicts["compile/a/graph_breaks"] is Verdict.PASS
    assert Signals(seen).verdicts["compile/b/graph_breaks"] is Verdict.MISSING


def test_crashed_run_is_a_fault_and_killed_run_is_not(reading: Readings) -> None:
    crashed = reading(complete=False, failure="died of SIGSEGV", code=-11)
    assert Signals(crashed).verdicts == {"the run": Verdict.REGRESSION}
    assert Signals(reading(complete=False, failure="died of SIGKILL", code=-9)).verdicts == {}
    test = SuiteTest(Path(), "cpu", (), "torch")
    test.learn([reading(row("a", GREEN))], [crashed])
    assert test.deciding == ("the run",)
    assert test.judge(reading(row("a", GREEN))).outcome is Outcome.GOOD


# Metadata of environments.


def environment(
    folder: Path, name: str, version: str, requires: Iterable[str] = (), **more: str
) -> Environment:
    site = folder / "lib/python3.11/site-packages"
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    lines += [f"Home-page: {more['home']}"] if "home" in more else []
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    if "commit" in more:
        (site / name).mkdir()
        (site / name / "version.py").write_text(f"__version__ = 'x'\ngit_version: str = '{more['commit']}'\n")
    return Environment(name, folder / "bin/python", "key", {name: version})


def test_torch_is_grouped_with_its_pinned_cuda_libraries(tmp_path: Path) -> None:
    pins = [
        "nvidia-cublas==13.1.0.3; platform_system == 'Linux'",
        "nvidia-nccl-cu13>=2",
        "triton==3.7.1",
        "sympy",
    ]
    old = environment(tmp_path / "a", "torch", "2.13.0", pins)
    new = environment(tmp_path / "b", "torch", "2.14.0", ["cuda-bindings==13.0"])
    assert blame.together(old, new) == [{"torch", "nvidia-cublas", "cuda-bindings"}], (
        "triton is a separate group"
    )


CUDA_12 = ["cudart", "cublas", "cufft", "cufile", "nvjitlink"]
CUDA_13 = ["cublas==13.1.0.3.*", "cufft==12.0.*", "cufile==1.15.*", "nvjitlink<14,>=13.0"]


def cuda_step(folder: Path) -> list[Environment]:
    """The requirements of torch 2.10 (CUDA 12, each library pinned) and 2.11 (CUDA 13, through cuda-toolkit)."""
    linux = "; platform_system == 'Linux'"
    libraries = [f"nvidia-{name}-cu12" for name in CUDA_12]
    old = environment(
        folder / "a", "torch", "2.10.0", [*(f"{n}==12.8{linux}" for n in libraries), "triton==3.6.0"]
    )
    new = environment(
        folder / "b",
        "torch",
        "2.11.0",
        [f"cuda-toolkit[cublas,cufft,cufile]==13.0.2{linux}", "nvidia-nccl-cu13==2.28.9", "triton==3.6.0"],
    )
    requires = [f"nvidia-{r}; extra == '{r.partition('=')[0].partition('<')[0]}'" for r in CUDA_13]
    environment(folder / "b", "cuda-toolkit", "13.0.2", [*requires, "nvidia-npp==13.0.*; extra == 'npp'"])
    environment(folder / "b", "nvidia-cufft", "12.0.1", ["nvidia-nvjitlink"])
    sides = [
        dict.fromkeys(libraries, "12.8") | {"torch": "2.10.0", "triton": "3.6.0", "setuptools": "80.1"},
        {
            "torch": "2.11.0",
            "triton": "3.6.0",
            "setuptools": "80.9",
            "cuda-toolkit": "13.0.2",
            "numpy": "2.4.0",
        }
        | {f"nvidia-{r.partition('=')[0].partition('<')[0]}": "13" for r in CUDA_13}
        | {"nvidia-nccl-cu13": "2.28.9", "cuda-bindings": "13.0.3"},
    ]
    return [replace(e, packages=packages) for e, packages in zip((old, new), sides)]


def check_cuda_step(module: Any, folder: Path) -> None:
    """torch needs the libraries of its own CUDA: a mixture does not import. The search has read both endpoints."""
    old, new = cuda_step(folder)
    every = frozenset(change.name for change in changes(old.packages, new.packages))
    known = [(frozenset[str](), Outcome.GOOD), (every, Outcome.BAD)]
    for culprit, most in (("torch", 2), ("numpy", 6)):
        seen: list[Mixture] = []

        def probe(
            mixture: Mixture, packages: dict[str, str], culprit: str = culprit, seen: list[Mixture] = seen
        ) -> Outcome:
            seen.append(mixture)
            later = packages["torch"] == "2.11.0"
            if (
                any(name in packages for name in ("nvidia-cufile", "cuda-toolkit", "nvidia-nvjitlink"))
                != later
            ):
                return Outcome.SKIP
            return Outcome.BAD if culprit in mixture else Outcome.GOOD

        groups = module.together(old, new)
        found = attribute(old.packages, new.packages, probe, groups, known=known, first="torch")
        assert culprit in {change.name for change in found.changes}
        assert (found.unresolved, found.needed, found.separable) == (0, True, True)
        assert len(seen) <= most, (culprit, seen)


def test_cuda_12_to_13_step_takes_few_mixtures(tmp_path: Path) -> None:
    check_cuda_step(blame, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('for extra in (extras or {""})', 'for extra in {""}'),
        (
            "if linked := _linked(environment, name)",
            "if linked := {r.name for r in _requirements(environment, name, frozenset()) if LINKED.fullmatch(r.name)}",
        ),
        ("pinned or LINKED.fullmatch(name)", "pinned and '*' not in str(requirement.specifier)"),
    ],
    ids=["without extras", "one level", "without ranges"],
)
def test_mutant_that_ignores_pins_is_caught(old: str, new: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_cuda_step(mutant_of(blame, old, new), tmp_path)


def test_compare_link_uses_wheel_metadata(tmp_path: Path) -> None:
    home = "https://github.com/triton-lang/triton/"
    old = environment(tmp_path / "a", "triton", "3.7.0+gitabcdef12", home=home)
    new = environment(tmp_path / "b", "triton", "3.7.1", home=home, commit="9" * 40)
    link = blame.compare_link(old, new, "triton")
    assert link == f"https://github.com/triton-lang/triton/compare/abcdef12...{'9' * 40}"
    silent = environment(tmp_path / "c", "triton", "3.7.2", home=home)
    elsewhere = environment(tmp_path / "d", "triton", "3.7.3", home="https://pytorch.org", commit="8" * 40)
    assert blame.compare_link(old, silent, "triton") == ""
    assert blame.compare_link(elsewhere, elsewhere, "triton") == ""


def test_prefetch_builds_ahead_unless_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalIndex() as index:
        isolated(monkeypatch, tmp_path, index.url)
        make_builds(tmp_path / "wheels", index)
        requests = [Request((f"torch=={v}",)) for v in ("2.0.0", "99.0", "2.1.0")]
        full = Prefetch(free=1 << 62)
        full.start(requests)
        assert index.requests == []
        ahead = Prefetch(free=0)
        ahead.start(requests)
        places = tmp_path / "home/environments"
        deadline = time.monotonic() + 60
        while len(list(places.glob("[!.]*/bumpgate.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ahead.stop()
        before = len(index.requests)
        for request in (requests[0], requests[2]):
            assert build(request).packages["torch"] == request.requirements[0][len("torch==") :]
        assert len(index.requests) == before, "the environment was built again"


def test_watcher_reports_progress_on_a_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Watcher(console) as watcher:
        watcher.probing("torch 2.1.0")
        watcher.probed(
            "torch 2.1.0",
            Reading(Path(), Cause.RAN, 1, seconds=2.5),
            ProbeResult(Outcome.BAD, "exit [1]"),
            "x",
        )
    assert "\x1b[" in out.getvalue()
    assert "torch 2.1.0 in 2.5 s: exit [1]; x" in out.getvalue()
    assert watcher.seconds == 2.5
    plain = io.StringIO()
    with Watcher(Console(file=plain, width=40)) as watcher:
        watcher.probed("torch 2.1.0", Reading(Path(), Cause.RAN, 1), ProbeResult(Outcome.GOOD, "z" * 90), "")
    assert plain.getvalue() == f"GOOD    torch 2.1.0 in 0.0 s: {'z' * 90}\n"


def test_adjacent_versions_have_none_between() -> None:
    span = Range("torch", ("2.0.0", "2.1.0"), "2.0.0", "2.1.0", {})
    assert "0 versions between" in span.summary(4)

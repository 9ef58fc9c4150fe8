"""Messages: one per cause and channel, never twice, sent later if a channel failed, without secrets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bumpgate.core.rows import Record, Verdict
from bumpgate.gate.verdict import Side
from bumpgate.history.archive import Archive, default_store
from bumpgate.notify import channels
from tests.support.fake_services import FakeServices
from tests.support.project import Result, in_process
from tests.support.reports import BREAKS, HERE, OTHER, THERE, gate_of_day, judged, row, write_gate

TOKEN, HOOK_PATH = "ghp_0123456789abcdef", "hook/T000/B000/xoxSECRETxox"
PROBLEM = "suites/a/test_b.py::test_c: ValueError: "


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServices]:
    with FakeServices() as found:
        monkeypatch.setattr(channels, "WAITS", (0, 0))
        hook = f"json://127.0.0.1:{urlsplit(found.url).port}/{HOOK_PATH}"
        variables = {
            "GITHUB_API_URL": found.url,
            "BUMPGATE_GITHUB_TOKEN": TOKEN,
            "BUMPGATE_APPRISE_URLS": hook,
        }
        for name, value in (
            variables | {"BUMPGATE_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        ).items():
            monkeypatch.setenv(name, value)
        yield found


def notify(*args: str) -> Result:
    return in_process(Path(), "notify", *args)


def night(folder: Path, day: int, *args: object, **options: object) -> None:
    Archive(default_store()).add(gate_of_day(folder, day, *args, **options))  # type: ignore[arg-type]


def test_issue_is_opened_updated_closed_and_opened_again(tmp_path: Path, services: FakeServices) -> None:
    printed = []
    for day, red in ((1, (BREAKS,)), (2, (BREAKS,)), (3, ()), (4, ()), (5, (BREAKS,))):
        night(tmp_path, day, red)
        printed += [notify("--github", "o/r").out.splitlines() for _ in range(2)]
    title = "bumpgate: cpu, torch: CHANGED in suites/compile/test_policies.py"
    events = ["opened", "updated", "closed", None, "reopened"]
    for first, again, event in zip(printed[::2], printed[1::2], events):
        assert first == ([f"github:o/r #1: {event}: {title}"] if event else ["github:o/r: nothing new"])
        assert again == ["github:o/r: nothing new"]
    assert services.changes == ["POST /repos/o/r/issues"] + ["PATCH /repos/o/r/issues/1"] * 3
    (issue,) = services.issues.values()
    assert (issue["title"], issue["state"], issue["labels"]) == (title, "open", ["bumpgate"])
    assert f"rows: {BREAKS}" in issue["body"]
    assert f"candidate: {BREAKS}: 17 count" in issue["body"]
    assert "moved: torch 2.14.0 -> 2.15.0" in issue["body"]
    assert {headers["Authorization"] for headers in services.headers} == {f"token {TOKEN}"}


def test_storm_of_200_red_rows_of_one_module_is_one_message(tmp_path: Path, services: FakeServices) -> None:
    """Every row has its own metric, so the gate shows 200 findings."""
    rows = [f"compile/nam52/count_{n}" for n in range(200)]
    night(tmp_path, 1, rows, rows=rows)
    assert len(Archive(default_store()).findings()) == 200
    assert notify("--github", "o/r", "--apprise").code == 0
    assert len(services.issues) == len(services.texts) == 1
    assert "200 findings, 200 rows." in services.issues[1]["body"]
    assert "and 190 more findings: bumpgate findings list --lane cpu" in services.issues[1]["body"]
    night(tmp_path, 2, rows[:150], rows=rows)
    assert notify("--github", "o/r", "--apprise").code == 0
    assert len(services.issues) == len(services.texts) == 1
    night(tmp_path, 3, (), rows=rows)
    assert notify("--github", "o/r", "--apprise").code == 0
    assert services.issues[1]["state"] == "closed"
    assert len(services.texts) == 2


def storm(folder: Path, day: int, modules: int) -> Path:
    """Write a gate with 200 red rows in this number of test modules."""
    folder = folder / f"storm-{day}"
    folder.mkdir()
    made = [row(f"compile/c{n}/m{n}", test=f"suites/a/test_{n % modules}.py::test_x") for n in range(200)]
    good, bad = (tuple(judged(verdict, r) for r in made) for verdict in (Verdict.PASS, Verdict.CHANGED))
    started = f"2026-11-{day:02d}T02:00:00+00:00"
    sides = (
        Side("torch 2.14.0", Record(HERE | {"started": started}, good)),
        Side("torch 2.15.0", Record(THERE | {"started": started}, bad)),
    )
    return write_gate(folder, *sides, started=started)[0]


def test_storm_over_many_modules_is_one_message_per_bump(tmp_path: Path, services: FakeServices) -> None:
    for day in (2, 3):
        Archive(default_store()).add(storm(tmp_path, day, 20))
        assert notify("--apprise").code == 0
    (during,) = services.texts
    assert "cpu, torch: many causes at once on 2026-11-02T02:00" in during
    assert "moved: torch 2.14.0 -> 2.15.0" in during


def test_five_new_causes_are_five_messages(tmp_path: Path, services: FakeServices) -> None:
    Archive(default_store()).add(storm(tmp_path, 1, 5))
    assert notify("--apprise").code == 0
    assert len(services.texts) == 5


def test_failing_channel_prints_one_line_blocks_no_other_and_is_sent_later(
    tmp_path: Path, services: FakeServices
) -> None:
    night(tmp_path, 1)
    later = "1 message not sent: the next bumpgate notify sends them"
    for answers, line, attempts in (
        ([401], "github:o/r: 401 Unauthorized", 1),
        ([500] * 3, "github:o/r: 500 Internal Server Error", 3),
        ([301], "github:o/r: redirected to another host", 1),
        ([307], "github:o/r: the answer is not an issue", 1),
    ):
        services.answers = [*answers]
        before = len(services.changes)
        ran = notify("--github", "o/r")
        assert (ran.code, ran.err) == (125, f"bumpgate: {line}; {later}\n")
        assert len(services.changes) - before == attempts
    assert not any("elsewhere" in request for request in services.requests)
    services.answers = [401]
    assert notify("--github", "o/r", "--apprise").code == 125
    assert len(services.texts) == 1
    services.answers = [503, 429]
    assert notify("--github", "o/r", "--apprise").code == 0
    assert (len(services.issues), len(services.texts)) == (1, 1)


def test_failing_chat_is_sent_later(
    tmp_path: Path, services: FakeServices, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    night(tmp_path, 1)
    services.answers = [500] * 3
    ran = notify("--apprise")
    assert ran.code == 125
    (line,) = ran.err.splitlines()
    assert re.fullmatch(
        r"bumpgate: json:\w{8}: not delivered; 1 message not sent: the next .* sends them", line
    )
    assert (len(services.changes), services.texts) == (3, [])
    assert notify("--apprise").code == notify("--apprise").code == 0
    assert len(services.texts) == 1
    monkeypatch.setenv("BUMPGATE_APPRISE_URLS", "json://127.0.0.1:1/xoxSECRETxox")
    ran = notify("--apprise")
    assert ran.code == 125, "another channel, which nothing answers"
    assert "SECRET" not in ran.err + capfd.readouterr().err


def test_issue_whose_response_was_lost_is_not_created_twice(tmp_path: Path, services: FakeServices) -> None:
    night(tmp_path, 1)
    services.lost = 3
    assert notify("--github", "o/r").code == 125
    assert len(services.issues) == 1
    assert notify("--github", "o/r").code == 0
    assert len(services.issues) == 1


def test_issue_closed_or_deleted_by_a_user(tmp_path: Path, services: FakeServices) -> None:
    night(tmp_path, 1)
    assert notify("--github", "o/r").code == 0
    services.issues[1]["state"] = "closed"
    night(tmp_path, 2)
    assert notify("--github", "o/r").code == 0
    assert services.issues[1]["state"] == "closed", "an update does not open it again"
    services.issues = {7: {"number": 7, "body": None}}
    night(tmp_path, 3)
    assert notify("--github", "o/r").code == 0
    assert [issue.get("title", "")[:8] for issue in services.issues.values()] == ["", "bumpgate"]


def test_dry_run_prints_and_changes_nothing(
    tmp_path: Path, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    night(tmp_path, 1)
    monkeypatch.delenv("BUMPGATE_GITHUB_TOKEN")
    for _ in range(2):
        ran = notify("--github", "o/r", "--apprise", "--dry-run")
        out = ran.out
        assert ran.code == 0
        assert out.count(": would be opened: bumpgate: cpu, torch: CHANGED in ") == 2
        assert f"rows: {BREAKS}" in out
    assert services.requests == []
    assert Archive(default_store()).findings()[0].topic is None


def test_no_secret_in_messages_output_or_errors(
    tmp_path: Path, services: FakeServices
) -> None:  # fmt: skip
    """The evidence, the server's responses and the URLs contain secrets."""
    evil = f"{TOKEN} {services.url}/{HOOK_PATH} https://user:hunter22@index/x @everyone ```"
    night(tmp_path, 1, (), problems=(PROBLEM + evil,))
    services.answers = [500] * 6
    channels = ("--github", "o/r", "--apprise")
    runs = [notify(*channels), notify(*channels, "--dry-run"), notify(*channels)]
    assert [ran.code for ran in runs] == [125, 0, 0]
    shown = [services.issues[1]["body"], services.issues[1]["title"], *services.texts]
    shown += [text for ran in runs for text in (ran.out, ran.err)]
    for text in shown:
        for secret in (TOKEN, "xoxSECRETxox", "hunter22"):
            assert secret not in text
    assert "````text\n" in services.issues[1]["body"], "the fence is longer than any in the text"
    assert "https://index/x" in services.texts[0]


def bisect_json(folder: Path, **more: object) -> Path:
    """Write the answer of a bisect that followed the row BREAKS."""
    found = {"package": "torch", "failure": "", "first": "2.15.0.dev3", "last": "2.15.0.dev2", "at_fault": []}
    found |= {"findings": [{"rows": [BREAKS], "repro": "", "candidate": []}], "compare": []}
    (folder / "bisect.json").write_text(json.dumps(found | more))
    return folder / "bisect.json"


def test_bisect_result_is_added_to_the_issue_and_kept(tmp_path: Path, services: FakeServices) -> None:
    other = "suites/x/test_y.py::test_z: KeyError"
    night(tmp_path, 1, problems=(other,))
    library = {"name": "nvidia-nccl-cu13", "old": "2.29", "new": "2.30"}
    at_fault = [library, {"name": "triton", "old": "3.8.0", "new": "3.9.0"}]
    answer = bisect_json(
        tmp_path, at_fault=at_fault, pinned=[library["name"]], compare=["https://x/compare/a...b"]
    )
    assert notify("--github", "o/r", "--bisect", str(answer)).code == 0
    night(tmp_path, 2, problems=(other,))
    assert notify("--github", "o/r").code == 0
    lines = (
        "bisect: first bad torch 2.15.0.dev3, last good torch 2.15.0.dev2\nat fault: triton 3.8.0 -> 3.9.0\n"
    )
    assert [lines in issue["body"] for issue in services.issues.values()].count(True) == 1
    assert len(services.issues) == 2
    answer.write_text("[]")
    ran = notify("--apprise", "--bisect", str(answer))
    assert ran.code == 4
    assert "bisect.json: not a bisect.json" in ran.err


def test_answer_of_a_bisect_is_not_shown_for_a_later_regression(
    tmp_path: Path, services: FakeServices
) -> None:
    """The cause of the first one is gone, and another row breaks in another version."""

    def after(day: int, red: tuple[str, ...], *options: str) -> str:
        night(tmp_path, day, red, label=Verdict.CHANGED)
        assert notify("--github", "o/r", *options).code == 0
        (issue,) = services.issues.values()
        return f"{issue['state']} {issue['body']}"

    assert "first bad torch 2.15.0.dev3" in after(1, (BREAKS,), "--bisect", str(bisect_json(tmp_path)))
    assert after(2, ()).startswith("closed")
    later = after(20, (OTHER,))
    assert later.startswith("open")
    assert OTHER in later
    assert "first bad torch 2.15.0.dev3" not in later


GITHUB, APPRISE = ("--github", "o/r"), ("--apprise",)
URLS = "BUMPGATE_APPRISE_URLS"
HTTP = "http://example.org/SECRET"


@pytest.mark.parametrize(
    ("args", "variables", "words"),
    [
        ((), {}, "name a channel: --github OWNER/REPOSITORY or --apprise"),
        (("--github", "https://github.com/o/r"), {}, "expected OWNER/REPOSITORY"),
        (
            GITHUB,
            {"BUMPGATE_GITHUB_TOKEN": "", "GITHUB_TOKEN": ""},
            "put a token into the environment variable",
        ),
        (GITHUB, {"BUMPGATE_GITHUB_TOKEN": "ghp_\nSECRET"}, "put a token into"),
        (GITHUB, {"GITHUB_API_URL": HTTP}, "GITHUB_API_URL is not an https URL"),
        (APPRISE, {URLS: ""}, "put the channels' URLs into"),
        (APPRISE, {URLS: "nonsense://SECRET"}, "URL 1 of BUMPGATE_APPRISE_URLS is not"),
        (
            (*APPRISE, "--bisect", "/nowhere"),
            {},
            "/nowhere: not a bisect.json that can be read (No such file",
        ),
    ],
)
def test_notify_bad_input_prints_one_line(
    services: FakeServices,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    variables: dict[str, str],
    words: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ran = notify(*args)
    assert ran.code == 4
    (line,) = ran.err.splitlines()
    assert words in line
    assert "SECRET" not in line

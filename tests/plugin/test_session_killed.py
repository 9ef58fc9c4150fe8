"""A killed session keeps its measurements, and an older record is not mistaken for its own."""

from __future__ import annotations

import signal

from tests.support.project import GOOD, Project, counted


def test_killed_session_keeps_its_measured_rows(project: Project) -> None:
    project.tests(
        """
        @lanes("cpu")
        def test_good(lane, row):
            row.count("compile/good/graph_breaks", 13, expected=13, **COUNT)
            time.sleep(5.2)  # rows are saved every five seconds

        @lanes("cpu")
        def test_killer(lane):
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    project.pytest("-m", "cpu", "-n", "0")
    record = project.record()
    assert [j.row.id for j in record.judgements] == ["compile/good/graph_breaks"]
    assert not record.complete


def test_killed_session_leaves_no_older_record(project: Project) -> None:
    project.tests(GOOD)
    project.baseline(good=counted("test_good"))
    assert project.pytest("-m", "cpu", "-n", "0").code == 0
    project.tests("@lanes('cpu')\ndef test_good(lane):\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    assert project.pytest("-m", "cpu", "-n", "0").code == -signal.SIGKILL
    assert (project.record().complete, project.verdicts()) == (False, {})

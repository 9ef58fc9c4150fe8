"""Repository rules that are checked automatically."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.support.tree import ROOT

INSTRUMENTS = [ROOT / "bumpgate/plugin/instruments", ROOT / "suites/support/instruments"]
FOLDERS = ("kernels", "model", "launch", "suites", "bumpgate")
# Documented by torch as compiler configuration; only instruments may read other private names.
LAUNCHER_MAY = {
    "torch._dynamo",
    "torch._dynamo.config",
    "torch._dynamo.lookup_backend",
    "torch._dynamo.maybe_mark_dynamic",
}

# The dataclasses that are not frozen.
FILLED_BY_A_RUN = {
    *("Builder", "CommandTest", "Compiled", "DynamoReport", "Fitter", "Fleet", "Gate", "GateRunner"),
    *("InductorReport", "InteractiveTest", "Interim", "Known", "Mirror", "Reports", "Rounds", "Series"),
    *("Sessions", "SideState", "SuiteTest", "TimedTest", "_Open", "_Reader", "_Seen"),
}


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def private_names(path: Path) -> set[str]:
    """Return dotted private torch names that a file imports or reads."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if re.match(r"torch(\.\w+)*\._[a-z]", name)}


def test_private_torch_names_are_used_by_instruments_only() -> None:
    found = {}
    for path in python_files("kernels", "model", "suites", "bumpgate"):
        names = private_names(path)
        if names and path.parent not in INSTRUMENTS:
            found[str(path.relative_to(ROOT))] = names
    for path in python_files("launch"):
        if names := private_names(path) - LAUNCHER_MAY:
            found[str(path.relative_to(ROOT))] = names
    assert not found, found


def test_private_names_finds_those_of_the_instruments() -> None:
    assert private_names(INSTRUMENTS[0] / "dynamo.py")
    assert private_names(INSTRUMENTS[1] / "inductor.py")


def test_imports_obey_the_import_linter_contracts() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_root_conftest_is_short_and_imports_no_torch() -> None:
    text = (ROOT / "conftest.py").read_text()
    assert len(text.splitlines()) < 100
    assert not re.search(r"^(import|from) torch", text, re.MULTILINE)


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_have_at_most_500_lines(folder: str) -> None:
    long = {str(p): n for p in python_files(folder) if (n := len(p.read_text().splitlines())) > 500}
    assert not long, long


def test_readme_commands_exist() -> None:
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    named = set(re.findall(r"tox -e ([\w-]+)", (ROOT / "README.md").read_text()))
    assert {"cpu", "self", "lint"} <= named
    sections = {name.replace("{triton36,triton37,triton39}", "triton37") for name in tox.sections()}
    sections = {name.replace("{,-triton39}", "") for name in sections}
    assert all(f"testenv:{name}" in sections for name in named)


LONGEST_TEST_NAME = 60
# Avoided wording -> its replacement. CONTRIBUTING.md has these words too, and those that depend on the context.
AVOIDED = {
    "anew": "again, or the prefix re-",
    "beside": "next to, alongside, in addition to",
    "is asked": "is requested, is configured",
    "is said": "is stated, is known",
    "is told": "receives, is reported, is known",
    "nobody": "no user, no process, or a direct clause: if no ...",
    "of late": "recently",
    "of old": "earlier, previous, as before",
    "owed": "required, missing, pending",
    "stands": "is, is located, remains, represents",
    "tells": "reports, returns, prints, shows",
    "told": "reported, returned, printed, known",
    "wanted": "expected, requested, required",
}
# (file, words, reason) where an avoided word is correct or cannot be changed; "*": all words.
EXCEPTIONS = (
    ("tests/repository/test_house.py", "*", "the list itself, and the texts that its test plants"),
    ("suites/launch/test_children.py", "told", "a row id, which baselines and histories have"),
    ("suites/launch/test_process_group.py", "told", "a row id, which baselines and histories have"),
)
# Test modules that run the tests of others, with an injected fault.
RUNS_OTHER_TESTS = ("tests/suites/test_non_finite.py",)
# Words are separated by anything but letters, also by the underscores of an identifier and the `#` of a comment.
LETTER, GAP = r"[^\W\d_]", r"[\s#_]+"
ALTERNATIVES = "|".join(word.replace(" ", GAP) for word in sorted(AVOIDED, key=len, reverse=True))
AVOIDED_PATTERN = re.compile(rf"(?<!{LETTER})(?:{ALTERNATIVES})(?!{LETTER})", re.IGNORECASE)
MARKDOWN_CODE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$|^ {4}[^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def tracked(*suffixes: str) -> list[Path]:
    command = ["git", "ls-files", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [path for name in names if name.endswith(suffixes) and (path := ROOT / name).exists()]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line}"


def avoided_words(path: Path) -> list[tuple[str, str]]:
    """Return (word, finding) pairs: every word of Python, TOML and YAML, and of Markdown outside code."""
    text = path.read_text()
    if path.suffix == ".md":
        text = MARKDOWN_CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)
    findings = []
    for found in AVOIDED_PATTERN.finditer(text):
        word = re.sub(GAP, " ", found[0].lower())
        line = text.count("\n", 0, found.start()) + 1
        findings.append((word, f"{place(path, line)}: {word!r}: write {AVOIDED[word]}"))
    return findings


def excepted_words(path: Path) -> set[str]:
    words = next((words for name, words, _ in EXCEPTIONS if path == ROOT / name), "")
    return set(AVOIDED) if words == "*" else set(words.split())


def long_test_names(path: Path) -> list[str]:
    """Return a finding for each test function whose name is longer than LONGEST_TEST_NAME."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        f"{place(path, node.lineno)}: {node.name} has {len(node.name)} characters, at most {LONGEST_TEST_NAME}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions)
        and node.name.startswith("test_")
        and len(node.name) > LONGEST_TEST_NAME
    ]


def imported_test_modules(path: Path) -> list[str]:
    """Return a finding for each statement that imports a test module."""
    findings = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            continue
        found = [name for name in names if any(part.startswith("test_") for part in name.split("."))]
        if found:
            findings.append(
                f"{place(path, node.lineno)}: imports {found[0]}: move shared code to a plain module"
            )
    return findings


def test_texts_and_names_use_plain_words() -> None:
    found = [
        finding
        for path in tracked(".py", ".md", ".toml", ".yml", ".yaml")
        for word, finding in avoided_words(path)
        if word not in excepted_words(path)
    ]
    assert not found, "\n".join(["avoided words (CONTRIBUTING.md, Word list):", *found])


def test_test_names_are_short() -> None:
    found = [finding for path in tracked(".py") for finding in long_test_names(path)]
    assert not found, "\n".join(["names of tests:", *found])


def test_test_modules_import_no_test_module() -> None:
    modules = [path for path in tracked(".py") if path.name.startswith("test_")]
    modules = [path for path in modules if path.relative_to(ROOT).as_posix() not in RUNS_OTHER_TESTS]
    found = [finding for path in modules for finding in imported_test_modules(path)]
    assert not found, "\n".join(["imports of test modules:", *found])


def class_names(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Map each public class name to the files that define it."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
        for name in {node.name for node in nodes if not node.name.startswith("_")}:
            found.setdefault(name, []).append(path)
    return found


def test_class_names_have_one_meaning(tmp_path: Path) -> None:
    shared = {n: p for n, p in class_names(python_files("bumpgate", "launch", "model")).items() if len(p) > 1}
    assert not shared, "\n".join(f"class {name}: {', '.join(map(str, p))}" for name, p in shared.items())
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("class Plan: ...\nclass _Reader: ...\n")
    assert {n: len(p) for n, p in class_names(tmp_path.iterdir()).items()} == {"Plan": 2}


def changeable(paths: Iterable[Path]) -> set[str]:
    """Return the names of the dataclasses that are not frozen."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found |= {node.name for decorator in node.decorator_list if _changeable(decorator)}
    return found


def _changeable(decorator: ast.expr) -> bool:
    call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func).endswith("dataclass") and options.get("frozen") != "True"


def test_dataclasses_are_frozen_unless_a_run_fills_them(tmp_path: Path) -> None:
    """A value that a cache, a key or two threads share never changes. The others collect what a run produces."""
    found = changeable(python_files("bumpgate", "kernels", "launch", "model"))
    assert found == FILLED_BY_A_RUN
    planted = tmp_path / "planted.py"
    planted.write_text(
        "@dataclass\nclass A: ...\n@dataclass(frozen=False)\nclass B: ...\n@dataclass(frozen=True)\nclass C: ...\n"
    )
    assert changeable([planted]) == {"A", "B"}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("comment.py", "x = 1\n# run it anew\n", [(2, "anew")]),
        ("docstring.py", '"""A value that is\n    told to the caller."""\n', [(1, "is told")]),
        ("comment_lines.py", "# a row that is\n# told\n", [(1, "is told")]),
        ("message.py", 'raise ValueError(f"{x}: a file is wanted")\n', [(1, "wanted")]),
        (
            "identifiers.py",
            "wanted_rows = 1\n\n\nclass RowsWanted:\n    pass\n",
            [(1, "wanted"), (4, "wanted")],
        ),
        ("longer_words.py", "# unwanted, understands, besides, borrowed: other words\n", []),
        ("prose.md", "Text.\n\n```\nnobody\n```\n\nA `beside` b, where Nobody looks.\n", [(7, "nobody")]),
        ("indented.md", "Text:\n\n    a file beside it\n\nand one beside it.\n", [(5, "beside")]),
        ("reason.toml", '# as of old\nreason = "a value is owed"\n', [(1, "of old"), (2, "owed")]),
        ("step.yml", "description: what it tells\n", [(1, "tells")]),
    ],
)
def test_planted_word_is_found(tmp_path: Path, name: str, text: str, expected: list[tuple[int, str]]) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert avoided_words(path) == [(w, f"{path}:{n}: {w!r}: write {AVOIDED[w]}") for n, w in expected]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (long_test_names, f"def test_{'x' * (LONGEST_TEST_NAME - 4)}(): ...\n"),
        (imported_test_modules, "import tests.repository.test_house\n"),
        (imported_test_modules, "from tests import test_house\n"),
        (imported_test_modules, "from tests.repository.test_house import FOLDERS\n"),
    ],
)
def test_planted_structure_is_found(tmp_path: Path, rule: Callable[[Path], list[str]], text: str) -> None:
    path = tmp_path / "test_planted.py"
    path.write_text(f"def test_{'x' * (LONGEST_TEST_NAME - 5)}(): ...\nfrom tests.support.tree import ROOT\n")
    assert rule(path) == []
    path.write_text(text)
    (finding,) = rule(path)
    assert finding.startswith(f"{path}:1: ")


def test_word_exceptions_are_needed() -> None:
    for name, words, _ in EXCEPTIONS:
        found = {word for word, _ in avoided_words(ROOT / name)}
        assert found, name
        assert words == "*" or found >= set(words.split()), name


def test_contributing_lists_every_avoided_word() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [word for word in AVOIDED if f"`{word}`" not in text] == []

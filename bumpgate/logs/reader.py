"""Read logs in one pass: lines to events, events to families."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from bumpgate.logs.families import ZERO, Family, LogsError, compile_pattern, load_families
from bumpgate.logs.prefixes import Prefixes
from bumpgate.logs.report import Event, LogFinding, Report

ZEROS = bytes(48 if 48 <= byte <= 57 else byte for byte in range(256))  # ZERO for bytes
MEMO = 1 << 15  # distinct lines whose classification is kept
LINE = 1 << 16  # bytes; a longer line is split
STREAMS = 1 << 12  # ranks and processes with an open event
DISTINCT = 200  # unknown texts that are listed separately
SAMPLE = 400  # lines from which prefixes are learned
KEPT = 60  # lines of an event from which facts are taken

COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LEVEL = r"(?P<level>DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)"
GLOG, TORCH_OLD, NCCL, LOGGING = range(4)
HEADERS = (
    # torch, glog and absl: W1121 13:02:28.314000 31449 torch/_dynamo/x.py:17] text; [E321 02:07:08.4 x.cpp:6] text
    re.compile(
        r"(?:\d{4}-\d\d-\d\d [\d:.]+: )?\[?(?P<level>[VDIWEF])(?P<time>\d{2,4} [\d:.]+)? +(?P<pid>\d+)? ?"
        r"(?P<source>[^\s\]]+:\d+)\] ?(?P<text>.*)"
    ),
    # torch 2.0 to 2.2: [2023-09-28 14:50:06,548] [0/0] torch._dynamo.x: [WARNING] text
    re.compile(
        r"(?:\[(?P<time>\d{4}-[\d: ,.-]+)\] )?(?:\[\d+/[\d_]+\] )?"
        r"(?P<source>[\w.]+): \[(?P<level>[A-Z]+)\] ?(?P<text>.*)"
    ),
    # NCCL: node1:30526:30526 [0] NCCL INFO text
    re.compile(r"(?P<source>[\w.-]+:\d+:\d+) \[\d+\] (?:[\w.]+:\d+ )?NCCL (?P<level>[A-Z]+) (?P<text>.*)"),
    # Python's logging: 2026-11-21 13:02:54,821 INFO text; WARNING:logger:text; [time] [INFO] [file.py:7:f] text;
    # 2026-05-18 16:08:16,958 - root - INFO - text; ERROR 01-28 17:37:45 [core.py:866] text; time | INFO | a:b:7 - text
    re.compile(
        r"(?:\[?(?P<stamp>\d{4}-\d\d-\d\d[T ][\d:,.]+Z?)\]?)?[ :|\[-]*(?:\[?[\w.]+\]? - )?[\[<(]?"
        + _LEVEL
        + r"[\]>)]?(?:[ :]| *\|| - )(?P<time>\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? )?"
        r"(?:\[(?P<place>[\w./]+:\d+(?::[\w<>]+)?)\] )?(?:(?P<source>[\w.]+):(?!\d))? ?(?P<text>.*)"
    ),
)
QUIET = {"V", "D", "I", "DEBUG", "INFO", "NOTICE", "TRACE", "VERSION"}
MESSAGE_KEYS = ("message", "msg", "text", "event", "log")
LEVEL_KEYS, RANK_KEYS = ("level", "severity", "levelname", "lvl"), ("rank", "global_rank", "process_index")
TIME_KEYS = ("time", "timestamp", "ts", "asctime", "@timestamp")

# A warning or error must match both; the first costs a tenth of the second.
ALARM_HINTS = (
    "rror", "xception", "arning", "WARN", "ERR", "FAIL", "FATAL", "CRITICAL", "atal", "failed:", "fault", "dumped",
    "terminate", "borted", "illed", "ssertion", "panic", "efused:", "topped:",
)  # fmt: skip
ALARM = re.compile(
    r"(?:Error|Exception|Warning)\b(?!_)"
    r"|(?<!-)\b(?:[Ee]rror|[Ff]atal|[Ww]arning|panic|failed|refused|stopped) ?:(?! *[-+]?\.?\d)"
    r"|\b(?:ERROR|WARN|WARNING|FATAL|CRITICAL|FAIL|FAILED)\b|\b[Ff]atal (?:error|Python)|[Ss]egmentation fault"
    r"|core dumped|terminate called|\bAborted\b|\bKilled\b(?! \d+ stale)|\bAssertion\b"
)
# A command's help: its name with options, an option.
HELP = re.compile(r"usage: |\s*\[?--?[A-Za-z][\w-]*[ =,\]]")
TRACEBACK = "Traceback (most recent call last):"
CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
BELOW = re.compile(r"\s|$|frame #|Exception raised from |\+ ")
# Lines that torch and the C++ runtime print after an error, at the margin.
AFTER = re.compile(
    r"CUDA kernel errors might be|For debugging consider passing|Compile with `TORCH_USE_CUDA_DSA`"
    r"|Device-side assertion"
    r"|nccl\w+: |`?ptxas|tensor at position \d|saved metadata: |recomputed metadata: |Last error:"
    r"|terminate called |Search for `?cuda|Set TORCH|You can suppress this|Aborted\b|Fatal Python error: Aborted"
)
# The value of a loss or a gradient's norm, in every way that trainers print one. The best value may begin as inf.
METRIC = re.compile(
    r"(?i)(?<![a-z])(?:loss|nll|ppl|perplexity|grad(?:ient)?s?[ _.]?norm|gnorm|(?:global|total)[ _]norm)(?:[/.][\w.]+)?"
    r"(?:['\"`]?\s*(?:is|of|was)?[\s:=|>,({]+['\"]?)(?:(?:tensor|array|dtensor)\(\s*\[?)?[-+]?(?:nan|inf(?:inity)?)(?![a-z_])"
)
NO_METRIC = re.compile(r"(?i)(?:best|min|max|lowest|previous|prev|clip|initial|decreased|improved)[\w ]*$")
NON_FINITE = "non_finite"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Classification of a line, digits ignored. Its spans hold for every line that differs in digits alone.

    start: where the text after prefixes and header begins; prefix: where the launcher's prefixes end.
    rank_at: where the rank's digits are, None without one.
    header: index of HEADERS, None without one. match: family and pattern, None if it is in no family.
    """

    prefix: int
    start: int
    rank_at: tuple[int, int] | None
    host: str
    header: int | None
    match: tuple[int, int] | None
    alarm: bool


@dataclass(slots=True)
class _Open:
    """An event that later lines may join: by the prefix that a logger repeats, or by a traceback's state."""

    first: Event
    position: int
    first_match: tuple[int, int] | None
    match: tuple[int, int] | None
    alarm: bool
    repeated: str = ""
    header: int | None = None
    state: str = ""
    locked: bool = False
    lines: list[str] = field(default_factory=list)
    count: int = 1


@dataclass
class Reader:
    """Reader for one pass over the logs of a run.

    families: in the order of their priority.
    """

    families: tuple[Family, ...]
    file: str = ""
    memo: dict[bytes, _Seen] = field(default_factory=dict)
    open: dict[tuple[str, str | int | None], _Open] = field(default_factory=dict)
    position: Counter[int | None] = field(default_factory=Counter)
    counts: dict[int, Counter[int | None]] = field(default_factory=dict)
    first: dict[int, Event] = field(default_factory=dict)
    last: dict[tuple[int | None, str], int] = field(default_factory=dict)
    alerts: set[str] = field(default_factory=set)
    unknown: dict[str, tuple[int, Event]] = field(default_factory=dict)
    lines: int = 0
    # The event that took the line before, and that line's number.
    latest: tuple[_Open | None, int] = (None, 0)

    def __post_init__(self) -> None:
        self.patterns = [
            (*compile_pattern(text), (i, k))
            for i, family in enumerate(self.families)
            for k, text in enumerate(family.patterns)
        ]
        names = [family.name for family in self.families]
        self.non_finite = (names.index(NON_FINITE), -1) if NON_FINITE in names else None
        self.prefixes = Prefixes((), has_header)

    def read(self, lines: Iterable[bytes], file: str = "", rank: int | None = None) -> int:
        """Read the lines of one file; return their number.

        lines: in UTF-8. Most lines of a training differ from an earlier one in digits alone, and are not decoded.
        rank: of all lines that name none.
        """
        self.file = file
        lines = iter(lines)
        sample = list(islice(lines, SAMPLE))
        self.prefixes = Prefixes([_text(line) for line in sample], has_header)
        self.memo.clear()
        self.latest = None, 0
        number = 0
        memo, position = self.memo, self.position
        for number, line in enumerate(chain(sample, lines), 1):
            seen = memo.get(key := line.translate(ZEROS))
            if seen is None:
                if len(memo) >= MEMO:
                    memo.clear()
                seen = memo[key] = self.see(_text(line))
            at = seen.rank_at
            of = rank if at is None else int(line[at[0] : at[1]])
            position[of] += 1
            if self.open or seen.match or seen.alarm:
                self.take(_text(line).rstrip("\n"), number, of, seen)
        for event in self.open.values():
            self.close(event)
        self.open.clear()
        self.lines += number
        return number

    def see(self, line: str) -> _Seen:
        origin = self.prefixes.strip(line)
        rest = line[origin.end :].rstrip("\n").translate(ZERO)
        if "\x1b" in rest:
            rest = COLOUR.sub("", rest)
        if rest.startswith("{") and rest.rstrip().endswith("}") and (fields := _json(line[origin.end :])):
            level = fields["level"].upper()
            match = self.match(f"{fields['text']}\n{rest}".translate(ZERO))
            alarm = bool(level) and level not in QUIET
            return _Seen(origin.end, origin.end, origin.rank_at, origin.host, None, match, alarm)
        at, found = header_of(rest)
        if at == NCCL and found and found["level"] != "WARN":
            return _Seen(origin.end, origin.end, origin.rank_at, origin.host, at, None, False)
        if found:
            alarm, start = found["level"] not in QUIET, found.start("text")
        else:
            alarm = any(hint in rest for hint in ALARM_HINTS) and bool(ALARM.search(rest))
            alarm, start = (alarm and not HELP.match(rest)) or rest.startswith(TRACEBACK), 0
        return _Seen(origin.end, origin.end + start, origin.rank_at, origin.host, at, self.match(rest), alarm)

    def match(self, text: str) -> tuple[int, int] | None:
        """Return the first family that a text with digits as 0 belongs to, with the index of the pattern."""
        found = next(
            (at for literal, regex, at in self.patterns if literal in text and regex.search(text)), None
        )
        if self.non_finite and (found is None or found > self.non_finite):
            metric = METRIC.search(text)
            if metric and not NO_METRIC.search(text[: metric.start()]):
                return self.non_finite
        return found

    def take(self, line: str, number: int, rank: int | None, seen: _Seen) -> None:
        """Append a line to its stream's open event, or close that and open a new one if the line starts it."""
        if "\x1b" in line:
            line = COLOUR.sub("", line)
        found = HEADERS[seen.header].match(line, seen.prefix) if seen.header is not None else None
        fields = found.groupdict() if found else {}
        # Without ranks, a host or a logger's process id still distinguishes two writers.
        stream = ("rank", rank) if rank is not None else ("from", seen.host or fields.get("pid"))
        text = line[seen.start :] if found else line[seen.prefix :]
        event = self.open.get(stream)
        if event is not None:
            if self.joins(event, line, text, seen, fields):
                return self.keep(event, text, number)
            self.close(self.open.pop(stream))
        elif (
            rank is None
            and self.latest[1] == number - 1
            and self.continues(self.latest[0], text, seen, fields)
        ):
            return self.keep(self.latest[0], text, number)
        if not (seen.match or seen.alarm):
            return None
        if len(self.open) >= STREAMS:
            self.close(self.open.pop(next(iter(self.open))))
        self.open[stream] = event = self.begin(line, text, number, rank, seen, fields)
        self.latest = event, number
        return None

    def keep(self, event: _Open | None, text: str, number: int) -> None:
        """Keep a line that joined an event, for its facts."""
        if event and len(event.lines) < KEPT:
            event.lines.append(text)
        self.latest = event, number

    def continues(self, event: _Open | None, text: str, seen: _Seen, fields: dict[str, Any]) -> bool:
        """Whether a line without a tag is the stack of the tagged error just above it, which C++ prints in pieces."""
        if event is None or event.match is None or event.state or fields:
            return False
        return bool(
            AFTER.match(text)
            or text.startswith(("frame #", "Exception raised from "))
            or not text.strip()
            or (text.startswith("  what():") and seen.match)
        )

    def begin(
        self, line: str, text: str, number: int, rank: int | None, seen: _Seen, fields: dict[str, Any]
    ) -> _Open:
        """Open an event with its first line."""
        level = fields.get("level") or ""
        if seen.header is None and text.startswith("{") and (parsed := _json(text)):
            text, level, rank = (
                parsed["text"],
                parsed["level"].upper(),
                parsed["rank"] if rank is None else rank,
            )
            fields = {"stamp": parsed["time"]}
        origin = self.prefixes.strip(line)
        time = (fields.get("time") or fields.get("stamp") or origin.time or "").strip()
        source = fields.get("source") or fields.get("place") or ""
        first = Event(number, rank, time, level, source, text[:500], file=self.file, host=origin.host)
        # A logger that prints exact time and place repeats its header on each line of one event.
        exact = fields.get("time") and (seen.header != LOGGING or fields.get("place"))
        repeated = line[seen.prefix : seen.start].rstrip() if exact else ""
        state = "frames" if text.startswith(TRACEBACK) else ""
        locked = seen.match is not None and self.families[seen.match[0]].action in ("correlate", "ignore")
        return _Open(
            first,
            self.position[rank],
            seen.match,
            seen.match,
            seen.alarm,
            repeated,
            seen.header,
            state,
            locked,
            [text],
        )

    def joins(self, event: _Open, line: str, text: str, seen: _Seen, fields: dict[str, Any]) -> bool:
        """Whether a line belongs to the open event, which takes the line's family if that has a higher priority."""
        if event.repeated:
            if not fields or not line.startswith(event.repeated, seen.prefix):
                return False
            if seen.match and seen.match == event.first_match and event.count > 1:
                return False  # the logger's clock has ms resolution: a repetition of the same event
            if (
                seen.match
                and seen.match == event.first_match
                and event.first.text.translate(ZERO) == text.translate(ZERO)[:500]
            ):
                return False
            event.count += 1
            if event.state or text.startswith(TRACEBACK):
                self.trace(event, text, seen, inside=True)
            else:
                self.classify_line(event, seen)
            return True
        if event.state:
            return not fields and self.trace(event, text, seen)
        if not fields and text.startswith(TRACEBACK) and event.header in (LOGGING, TORCH_OLD) and event.alarm:
            event.state = "frames"  # a logger's exc_info: the message explains the exception
            return True
        if fields or not (BELOW.match(text) or (AFTER.match(text) and event.match)):
            return False
        # A warning is followed by the source line that raised it, which may look like another warning.
        event.count += 1
        if AFTER.match(text):
            return True
        own = seen.match is None and (not seen.alarm or event.count == 2)
        same = seen.match and event.match and seen.match[0] == event.match[0] and seen.match != event.match
        return bool(own or same)

    def classify_line(self, event: _Open, seen: _Seen) -> None:
        if seen.match and not event.locked and (event.match is None or seen.match < event.match):
            event.match = seen.match

    def trace(self, event: _Open, text: str, seen: _Seen, inside: bool = False) -> bool:
        """Whether a line continues a traceback: frames, exception line, quoted text; a chain is one event.

        Source lines in frames may contain any text: only the exception's lines determine the family.
        inside: the lines have a logger's header, so that all of them belong to the event.
        """
        state, blank = event.state, not text.strip()
        if state == "" or (inside and text.startswith(TRACEBACK)):
            event.state = "frames"
            return True
        if state == "frames":
            plain = not (seen.match or seen.alarm or EXCEPTION.match(text))
            if blank or text[0].isspace() or plain:  # plain: another writer's progress line
                return True
            # after "raised:" and the like, the cause is on the next lines, up to a blank one
            event.state = "quote" if text.rstrip().endswith(":") else "tail"
            if not event.locked:
                event.first = replace(event.first, text=text[:500])
        elif text.startswith(TRACEBACK):
            event.state = "frames"
            return state in ("chain", "quote", "quoted")
        elif text.startswith(CHAIN):
            event.state = "chain"
            return True
        elif blank:
            event.state = "quoted" if state == "quote" else state
            return True
        elif state == "quote":
            # torchrun's summary is between two bars
            event.count += 1
            event.state = "tail" if event.count > 2 and not text.strip("=") else "quote"
        elif AFTER.match(text) or text.startswith(("frame #", "Exception raised from ")):
            self.classify_line(event, seen)
            return True
        elif not text[0].isspace() and not inside:
            return False
        self.classify_line(event, seen)
        return True

    def close(self, event: _Open) -> None:
        if event.match is None:
            if event.alarm:
                key = event.first.text.translate(ZERO)
                key = key if key in self.unknown or len(self.unknown) < DISTINCT else "(others)"
                count, first = self.unknown.get(key, (0, event.first))
                self.unknown[key] = count + 1, first
            return
        index, rank, family = event.match[0], event.first.rank, self.families[event.match[0]]
        counts = self.counts.setdefault(index, Counter())
        counts[rank] += 1
        if index not in self.first:
            self.first[index] = replace(
                event.first, facts=facts_of(family, event.lines), lines=tuple(event.lines)
            )
        if family.action == "alert" or (family.bound is not None and counts[rank] > family.bound):
            self.alerts.add(family.name)
        self.last[rank, family.name] = event.position
        for other in self.families:
            if other is family or family.name in other.companions:
                near = other.companions if other is family else (other.name,)
                places = [self.last[rank, name] for name in near if (rank, name) in self.last]
                if any(abs(event.position - place) <= (other.within or 0) for place in places):
                    self.alerts.add(other.name)

    def report(self) -> Report:
        """Return what was read so far."""
        findings = (
            LogFinding(f, dict(self.counts[i]), self.first[i], f.name in self.alerts)
            for i, f in enumerate(self.families)
            if i in self.counts
        )
        return Report(self.lines, tuple(findings), self.unknown)


def header_of(text: str) -> tuple[int | None, re.Match[str] | None]:
    """Return the index in HEADERS of the header that begins a text, and the match; (None, None) without one."""
    for index, pattern in enumerate(HEADERS):
        if found := pattern.match(text):
            return index, found
    return None, None


def _text(line: bytes) -> str:
    return line.decode(errors="replace")


def has_header(text: str) -> bool:
    """Return whether a logger's header begins a text."""
    return header_of(text)[0] is not None


def facts_of(family: Family, lines: Sequence[str]) -> dict[str, str]:
    """Return the facts of an event: the first value of each name."""
    facts: dict[str, str] = {}
    for pattern in family.fact_patterns:
        for line in lines:
            if found := pattern.search(line):
                facts |= {k: v.strip() for k, v in found.groupdict().items() if v and k not in facts}
                break
    return facts


def _json(text: str) -> dict[str, Any] | None:
    """Return text, level, rank and time of a JSON line that has a message, else None."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    first = {
        name: next((parsed[key] for key in keys if key in parsed), "")
        for name, keys in (
            ("text", MESSAGE_KEYS),
            ("level", LEVEL_KEYS),
            ("time", TIME_KEYS),
            ("rank", RANK_KEYS),
        )
    }
    if not isinstance(first["text"], str) or not first["text"]:
        return None
    rank = first["rank"] if isinstance(first["rank"], int) else None
    return {"text": first["text"], "level": str(first["level"]), "time": str(first["time"]), "rank": rank}


def classify(lines: Iterable[str], families: tuple[Family, ...] | None = None) -> Report:
    """Classify the lines of one log in one pass.

    families: those of families.toml by default.
    """
    reader = Reader(load_families() if families is None else families)
    reader.read(line.encode(errors="surrogateescape") for line in lines)
    return reader.report()


RANK_IN_NAME = re.compile(r"(?:rank|worker|task|proc|local)[-_.]?(\d+)|^(\d+)$", re.IGNORECASE)


def classify_files(paths: Sequence[Path], families: tuple[Family, ...] | None = None) -> Report:
    """Classify the logs of one run: files (plain, .gz, .zst), "-" for stdin, folders of logs.

    A file whose name has a rank (`rank3.log`) gives it to lines that name none. Raises LogsError.
    """
    reader = Reader(load_families() if families is None else families)
    for path in expanded(paths):
        stem = path.name.split(".")[0]
        named = RANK_IN_NAME.search(stem) if len(paths) > 1 or path not in paths else None
        rank = int(named[1] or named[2]) if named else None
        with opened(path) as stream:
            reader.read(pieces(stream), str(path), rank)
    return reader.report()


def expanded(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files, and the files in folders. Raises LogsError on an empty folder."""
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not inside:
                raise LogsError(f"{path}: a folder without files; name a log")
            yield from inside
        else:
            yield path


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a log, unpacked.

    Raises LogsError, one line, on a file that is absent, or not text after unpacking.
    """
    try:
        raw: IO[bytes] = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    except OSError as error:
        raise LogsError(f"{path}: {error.strerror}") from None
    with raw:
        buffered = io.BufferedReader(_unpacked(path, io.BufferedReader(raw)))  # type: ignore[arg-type]
        try:
            head = buffered.peek(1 << 13)[: 1 << 13]
        except (OSError, EOFError) as error:
            raise LogsError(f"{path}: damaged: {error}") from None
        if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head:
            raise LogsError(f"{path}: not text; convert it first (iconv -t UTF-8), or name the log itself")
        bad = head.decode("utf-8", errors="replace").count("\ufffd")
        if bad > 10 + len(head) // 20:
            raise LogsError(f"{path}: not text: {bad} of its first {len(head)} bytes are not UTF-8")
        yield buffered


def _unpacked(path: Path, raw: io.BufferedReader) -> Any:
    magic = raw.peek(4)[:4]
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw)
    if magic == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            raise LogsError(
                f"{path}: zstd needs a package: pip install zstandard, or zstdcat {path} | bumpgate logs -"
            ) from None
        return zstandard.ZstdDecompressor().stream_reader(raw)
    return raw


def pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a log, at most LINE bytes each. A progress bar's carriage return ends a line."""
    try:
        while line := stream.readline(LINE):
            if b"\r" in line:
                yield from (part + b"\n" for part in line.rstrip(b"\r\n").split(b"\r"))
            else:
                yield line
    except (OSError, EOFError) as error:
        raise LogsError(f"damaged: {error}") from None

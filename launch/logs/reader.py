"""Read a log in one pass: lines to records, records to classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from launch.logs.classes import LogClass, compile_pattern, load_classes
from launch.logs.report import LogFinding, LogRecord, Report

# Lines are cached with digits replaced by 0: step numbers, times and sizes then cost nothing after the first line.
ZERO = str.maketrans("123456789", "000000000")
MEMO = 1 << 14
LINE = 1 << 16  # characters; a longer line is split
STREAMS = 1 << 12  # ranks and processes with an open record
DISTINCT = 200  # unknown texts listed separately

# The tag of a launcher, and torch's own, which may follow it; a run without ranks is tagged, too.
TAGS = re.compile(r"(?:\[run\]: )?(?:\[(?:rank|default|trainer)(\d+)\]:? ?)*")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
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
    # Python's logging: 2026-11-21 13:02:54,821 INFO text; WARNING:logger:text
    re.compile(
        r"(?P<stamp>\d{4}-\d\d-\d\d[T ][\d:,.]+Z?)?[ :\[-]*"
        r"(?P<level>DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\]?[ :](?:(?P<source>[\w.]+):)? ?(?P<text>.*)"
    ),
)
QUIET = {"V", "D", "I", "DEBUG", "INFO"}

# A warning or error must match both; the first costs a tenth of the second.
ALARM_HINTS = (
    "rror", "xception", "arning", "WARN", "ERR", "FAIL", "FATAL", "CRITICAL", "atal", "failed:", "fault", "dumped",
    "terminate", "borted", "illed", "ssertion", "panic", "efused:", "topped:",
)  # fmt: skip
ALARM = re.compile(
    r"(?:Error|Exception|Warning)\b|\b(?:[Ee]rror|[Ff]atal|[Ww]arning|panic|failed|refused|stopped) ?:"
    r"|\b(?:ERROR|WARN|WARNING|FATAL|CRITICAL|FAIL|FAILED)\b|\b[Ff]atal (?:error|Python)|[Ss]egmentation fault"
    r"|core dumped|terminate called|\bAborted\b|\bKilled\b|\bAssertion\b"
)
TRACEBACK = "Traceback (most recent call last):"
CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
BELOW = re.compile(r"\s|$|frame #|Exception raised from |\+ ")


@dataclass
class _Seen:
    """Classification of a line, ignoring digits: its class with the matching pattern, and whether it alerts."""

    match: tuple[int, int] | None
    alarm: bool
    header: re.Pattern[str] | None
    tagged: bool


@dataclass
class _Open:
    """A record that later lines may join: by the prefix repeated by torch's logger, or by a traceback's state."""

    first: LogRecord
    position: int
    match: tuple[int, int] | None
    alarm: bool
    prefix: str = ""
    state: str = ""
    lines: int = 1


@dataclass
class _Reader:
    """Reader for one pass over a log."""

    classes: tuple[LogClass, ...]
    memo: dict[str, _Seen] = field(default_factory=dict)
    open: dict[tuple[str, str | int | None], _Open] = field(default_factory=dict)
    position: Counter[int | None] = field(default_factory=Counter)
    counts: dict[int, Counter[int | None]] = field(default_factory=dict)
    first: dict[int, LogRecord] = field(default_factory=dict)
    last: dict[tuple[int | None, str], int] = field(default_factory=dict)
    alerts: set[str] = field(default_factory=set)
    unknown: dict[str, tuple[int, LogRecord]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.patterns = [
            (*compile_pattern(text), (i, k))
            for i, log_class in enumerate(self.classes)
            for k, text in enumerate(log_class.patterns)
        ]

    def read(self, lines: Iterable[str]) -> int:
        """Read all lines; return their number."""
        number = 0
        for number, line in enumerate(lines, 1):
            key = line.translate(ZERO)
            seen = self.memo.get(key)
            if seen is None:
                if len(self.memo) >= MEMO:
                    self.memo.clear()
                seen = self.memo[key] = self.see(key)
            rank = None
            if seen.tagged:
                tags = TAGS.match(line)
                rank, line = int(tags[1]) if tags[1] else None, line[tags.end() :]
            self.position[rank] += 1
            if self.open or seen.match or seen.alarm:
                self.take(line.rstrip("\n"), number, rank, seen)
        for record in self.open.values():
            self.close(record)
        return number

    def see(self, key: str) -> _Seen:
        """Classify one line. `key` is the line with digits replaced by 0."""
        tags = TAGS.match(key).end()
        rest = key[tags:].rstrip("\n")
        if "\x1b" in rest:
            rest = COLOUR.sub("", rest)
        match = next(
            (at for literal, regex, at in self.patterns if literal in rest and regex.search(rest)), None
        )
        header, alarm = None, False
        for pattern in HEADERS:
            if found := pattern.match(rest):
                header, alarm = pattern, found["level"] not in QUIET
                break
        else:
            if any(hint in rest for hint in ALARM_HINTS):
                alarm = bool(ALARM.search(rest))
            alarm = alarm or rest.startswith(TRACEBACK)
        return _Seen(match, alarm, header, tags > 0)

    def take(self, line: str, number: int, rank: int | None, seen: _Seen) -> None:
        """Append a line to its stream's open record, or close that and open a new one if the line starts it."""
        if "\x1b" in line:
            line = COLOUR.sub("", line)
        found = seen.header.match(line) if seen.header else None
        fields = found.groupdict() if found else {}
        # Without ranks, a logger's process id still distinguishes two writers.
        stream = ("rank", rank) if rank is not None else ("pid", fields.get("pid"))
        record = self.open.get(stream)
        if record is not None:
            if self.joins(record, line, seen, found):
                return
            self.close(self.open.pop(stream))
        if not (seen.match or seen.alarm):
            return
        time, text = fields.get("time") or fields.get("stamp") or "", fields.get("text", line)[:500]
        first = LogRecord(number, rank, time, fields.get("level") or "", fields.get("source") or "", text)
        # Only a logger that prints exact time and location repeats its prefix on each line of one event.
        prefix = line[: found.start("text")].rstrip() if found and fields.get("time") else ""
        state = "frames" if line.startswith(TRACEBACK) else ""
        if len(self.open) >= STREAMS:
            self.close(self.open.pop(next(iter(self.open))))
        self.open[stream] = _Open(first, self.position[rank], seen.match, seen.alarm, prefix, state)

    def joins(self, record: _Open, line: str, seen: _Seen, found: re.Match[str] | None) -> bool:
        """Whether a line belongs to the open record, which takes the line's class if it has none."""
        if record.state:
            return self.joins_traceback(record, line, seen, found)
        if record.prefix and line.startswith(record.prefix):
            if seen.match and seen.match == record.match:
                return False  # the logger's clock has ms resolution: a repetition of the same event
            record.match = record.match or seen.match
            return True
        if (found and record.prefix) or not BELOW.match(found["text"] if found else line):
            return False
        # A warning is followed by the source line that raised it, which may look like another warning.
        own = seen.match is None and (not seen.alarm or found or record.lines == 1)
        same = seen.match and record.match and seen.match[0] == record.match[0] and seen.match != record.match
        record.lines += 1
        return bool(own or same)

    def joins_traceback(self, record: _Open, line: str, seen: _Seen, found: re.Match[str] | None) -> bool:
        """Whether a line continues a traceback: frames, exception line, quoted text; a chain is one record.

        Source lines in frames may contain any text: only the exception's lines determine the class.
        """
        state, blank = record.state, not line.strip()
        if found is not None:
            return False
        if state == "frames":
            plain = not (seen.match or seen.alarm or EXCEPTION.match(line))
            if blank or line[0].isspace() or plain:  # plain: another writer's progress line
                return True
            # after "raised:" and the like, the cause is on the next lines, up to a blank one
            record.state = "quote" if line.rstrip().endswith(":") else "tail"
            record.first = replace(record.first, text=line[:500])
        elif line.startswith(TRACEBACK):
            record.state = "frames"
            return state in ("chain", "quote", "quoted")
        elif line.startswith(CHAIN):
            record.state = "chain"
            return True
        elif blank:
            record.state = "quoted" if state == "quote" else state
            return True
        elif state == "quote":
            # torchrun's summary is between two bars
            record.lines += 1
            record.state = "tail" if record.lines > 2 and not line.strip("=") else "quote"
        elif not line[0].isspace():
            return False
        if seen.match and (record.match is None or seen.match < record.match):
            record.match = seen.match
        return True

    def close(self, record: _Open) -> None:
        """Count a complete record."""
        if record.match is None:
            if record.alarm:
                key = record.first.text.translate(ZERO)
                key = key if key in self.unknown or len(self.unknown) < DISTINCT else "(others)"
                count, first = self.unknown.get(key, (0, record.first))
                self.unknown[key] = count + 1, first
            return
        index, rank, log_class = record.match[0], record.first.rank, self.classes[record.match[0]]
        counts = self.counts.setdefault(index, Counter())
        counts[rank] += 1
        self.first.setdefault(index, record.first)
        if log_class.action == "alert" or (log_class.bound is not None and counts[rank] > log_class.bound):
            self.alerts.add(log_class.name)
        self.last[rank, log_class.name] = record.position
        for other in self.classes:
            if other is log_class or log_class.name in other.companions:
                near = other.companions if other is log_class else (other.name,)
                places = [self.last[rank, name] for name in near if (rank, name) in self.last]
                if any(abs(record.position - place) <= (other.within or 0) for place in places):
                    self.alerts.add(other.name)


def classify(lines: Iterable[str], classes: tuple[LogClass, ...] | None = None) -> Report:
    """Classify lines in one pass. `classes`: contract.toml's by default; raises ContractError if these are invalid."""
    reader = _Reader(load_classes() if classes is None else classes)
    count = reader.read(lines)
    findings = (
        LogFinding(c, dict(reader.counts[i]), reader.first[i], c.name in reader.alerts)
        for i, c in enumerate(reader.classes)
        if i in reader.counts
    )
    return Report(count, tuple(findings), reader.unknown)


def read_lines(path: Path) -> Iterator[str]:
    """Yield lines of a log, invalid bytes replaced, at most LINE long. A progress bar's carriage return ends a line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from iter(partial(file.readline, LINE), "")

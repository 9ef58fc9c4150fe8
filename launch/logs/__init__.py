"""Classify a run's log by the classes of contract.toml's [logs.*]: python -m launch.logs FILE [--json].

A record is one line, or several lines of one event: a traceback with its chain, lines with the same prefix of torch's
logger, the stack below a C++ error. A warning or error that matches no class is reported as unknown. Lines of
different ranks may interleave in any way. A log is read once, in constant memory.
"""

from launch.logs.classes import LogClass, load_classes
from launch.logs.reader import TRACEBACK, classify, read_lines
from launch.logs.report import ALERT, CLEAN, UNKNOWN, USAGE, LogFinding, LogRecord, Report

__all__ = [
    "ALERT",
    "CLEAN",
    "TRACEBACK",
    "UNKNOWN",
    "USAGE",
    "LogClass",
    "LogFinding",
    "LogRecord",
    "Report",
    "classify",
    "load_classes",
    "read_lines",
]

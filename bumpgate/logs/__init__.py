"""What happened to a run: classify its logs by families of causes (rule C26).

An event is one line, or several that belong together: a traceback with its chain, lines with the same prefix of a
logger, the stack below a C++ error. Prefixes of launchers (srun, Kubernetes, Ray, Docker Compose, torchrun) are learned
from the file and stripped. An event of an alerting or counted family is a finding; a warning or error of no family is
reported as unknown. Ranks may interleave in any way. A log is read once, in constant memory, with the standard library
alone.
"""

from bumpgate.logs.families import Family, LogsError, load_families
from bumpgate.logs.reader import TRACEBACK, classify, classify_files
from bumpgate.logs.report import ALERT, CLEAN, UNKNOWN, Event, LogFinding, Report

__all__ = [
    "ALERT",
    "CLEAN",
    "TRACEBACK",
    "UNKNOWN",
    "Event",
    "Family",
    "LogFinding",
    "LogsError",
    "Report",
    "classify",
    "classify_files",
    "load_families",
]

"""The environment variables named BUMPGATE_*, and what each one holds.

The variables of RUNS are the protocol between bumpgate and the pytest runs that it starts. A user sets those of USERS.
"""

RUNS = {
    "BUMPGATE_ABSENT": "JSON: package -> reason why the environment of this run has no wheel of it",
    "BUMPGATE_CXX": "the C++ compiler itself, where CXX is the program that keeps compiled kernels",
    "BUMPGATE_DISK": "budget of all environments in bytes, such as 40G; set by --disk",
    "BUMPGATE_DUET": "JSON: the socket, cores and role of this side of a paired session",
    "BUMPGATE_GATE": "1 below a run with --gate: nothing that it starts may rewrite a baseline",
    "BUMPGATE_LOCK": "path of the lock of this run's environment, or none",
    "BUMPGATE_PARENT": "process id of the bumpgate that set the variables of this run",
    "BUMPGATE_PROGRESS": "file that this run rewrites with its progress",
    "BUMPGATE_PROJECT": "the folder from which this side of a gate imports the project under test",
    "BUMPGATE_ROUNDS": "rounds of a timed row in a paired session",
    "BUMPGATE_SESSION": "the rows that a paired session times",
    "BUMPGATE_SHARE": "the GPUs and cores that this run may use",
    "BUMPGATE_TIERS": "tiers that a whole-lane gate also collects, such as codegen",
    "BUMPGATE_UNTIMED": "1 in a run whose times are not used",
}
USERS = {
    "BUMPGATE_APPRISE_URLS": "where to send messages, as Apprise URLs",
    "BUMPGATE_GITHUB_TOKEN": "token for GitHub's API; GITHUB_TOKEN is the fallback",
    "BUMPGATE_HOME": "folder of stores and caches",
    "BUMPGATE_KERNELS": "folder of built kernel wheels; by default kernels/ in the home",
    "BUMPGATE_OBJECTS": "folder of compiled C++ kernels; empty disables it",
    "BUMPGATE_QUIET": "1: a gate prints its verdict alone; set by -q",
    "BUMPGATE_VERBOSE": "1: a gate prints every row and line of a finding; set by -v",
    "BUMPGATE_STORE": "folder of downloaded wheels; by default store/ in the home",
}

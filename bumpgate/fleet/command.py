"""`bumpgate fleet`: gates and bisects on many hosts, and a comparison of these hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bumpgate.bisect import command as bisect
from bumpgate.bisect.options import BisectError, Options
from bumpgate.bisect.probe import Hosts
from bumpgate.core.findings import Decision
from bumpgate.fleet import gates, inventory
from bumpgate.fleet.engine import Engine, FleetError, Lost, Task, features
from bumpgate.fleet.ray_engine import RayEngine
from bumpgate.fleet.readings import Readings
from bumpgate.fleet.slurm_engine import SlurmEngine
from bumpgate.report import history

BAD_INPUT = 4
app = typer.Typer(no_args_is_help=True)
app.command("bisect")(bisect.command)


@dataclass
class Fleet:
    """Options of `bumpgate fleet`. It connects at the first use."""

    ray: str
    slurm: Path | None
    settings: tuple[str, ...]
    host_class: str
    most: int
    _engine: Engine | None = None

    def engine(self) -> Engine:
        """Connect to the engine. Raises FleetError."""
        if self._engine is None:
            if bool(self.ray) == bool(self.slurm):
                raise FleetError("name one engine: --ray HOST:PORT, or --slurm FOLDER")
            settings = dict(text.partition("=")[::2] for text in self.settings)
            self._engine = SlurmEngine(self.slurm, settings) if self.slurm else RayEngine(self.ray)
        return self._engine

    def close(self) -> None:
        if self._engine:
            self._engine.close()

    def line(self) -> tuple[str, ...]:
        valued = {"--ray": self.ray, "--slurm": str(self.slurm or ""), "--host-class": self.host_class}
        parts = [part for option, value in valued.items() if value for part in (option, value)]
        parts += [part for text in self.settings for part in ("--set", text)]
        return ("fleet", *parts, "--probes", str(self.most))

    def check(self, options: Options) -> None:
        own = {
            "--builder": options.builder,
            "--environments": options.environments,
            "--interactive": options.interactive,
        }
        if name := next((name for name, value in own.items() if value), None):
            raise BisectError(f"{name} is for one host: bumpgate bisect {name}, without fleet")
        self.engine()

    def readings(self, options: Options, good: str) -> Hosts:
        needs = features(options.lane, self.host_class)
        return Readings(self.engine(), options, needs, self.most, Path.cwd(), good)


@app.callback()
def fleet(
    context: typer.Context,
    ray: Annotated[str, typer.Option(help="HOST:PORT of the head of a Ray cluster.")] = "",
    slurm: Annotated[
        Path | None, typer.Option(help="Use Slurm; a folder for its jobs that all hosts share.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="With --slurm: a setting of submitit, slurm_partition=gpu; repeatable."),
    ] = None,
    host_class: Annotated[str, typer.Option(help="Only hosts with the feature class_NAME.")] = "",
    probes: Annotated[int, typer.Option(help="The most probes of a bisect at once.", min=1)] = 16,
) -> None:
    """Run gates and bisects on the hosts of a Ray or Slurm cluster, or compare these hosts.

    A host offers the feature lane_NAME for each lane that it can run. Every host has the source tree at the same path.
    """
    context.obj = Fleet(ray, slurm, tuple(settings or ()), host_class, probes)
    context.call_on_close(context.obj.close)


@app.command()
def gate(
    context: typer.Context,
    lane: Annotated[list[str], typer.Option(help="A lane, measured on one host; repeatable.")],
    arguments: Annotated[list[str], typer.Argument(help="After --: options of bumpgate gate.")],
    out: Annotated[Path, typer.Option(help="A folder per lane with gate.json and its files.")] = Path(
        "build/fleet"
    ),
    archive: Annotated[
        str, typer.Option("--history", help="SQLAlchemy URL of the history that takes the gates.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Only the lanes of --out without a verdict.")
    ] = False,
) -> None:
    """Gate several lanes at once, each on a host that offers it. A lane whose hosts die is repeated on another one.

    Exit codes: 0 all ADOPT, 1 a HOLD, 125 a lane without a verdict, 4 bad input.
    """
    lanes = [*dict.fromkeys(lane)]
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if named := next((word for word in own if word.partition("=")[0] in ("--lane", "--out")), ""):
        raise FleetError(f"{named} after --: the fleet sets it for each gate; name it before --")
    known = {name: found for name in lanes if (found := gates.read(out / name))}
    if known and not resume:
        raise FleetError(f"{out} holds gates of {', '.join(known)}: add --resume, or name another --out")
    for name, found in known.items():
        if other := gates.differences(found, name, arguments, out):
            raise FleetError(f"{out / name} holds another gate ({other}): name another --out")
    codes = {found.decision.value for found in known.values()}
    engine = context.obj.engine()
    left = [name for name in lanes if name not in known]
    for result in gates.run(engine, left, context.obj.host_class, arguments, out):
        if result.gate is None:
            typer.echo(f"{Decision.UNKNOWN.name:8} {result.lane}: no verdict: {result.why}")
            codes.add(BAD_INPUT if result.bad_input else Decision.UNKNOWN.value)
            continue
        typer.echo(
            f"{result.gate.decision.name:8} {result.lane} on {result.host}: {len(result.gate.findings)} findings;"
            f" {result.gate.wall_seconds / 60:.1f} min; {out / result.lane / 'gate.json'}"
        )
        codes.add(result.gate.decision.value)
        if archive:
            history.command([history.ADD, str(out / result.lane / "gate.json")], store=archive)
    raise typer.Exit(next((code for code in (BAD_INPUT, 1, 125) if code in codes), 0))


@app.command()
def check(
    context: typer.Context,
    lane: Annotated[str, typer.Option(help="Only hosts that offer this lane.")] = "",
) -> None:
    """Compare the hosts: source tree, packages, compilers, driver, processor. Names each one that differs.

    Exit codes: 0 all equal, 1 one differs, 125 a host did not answer, 4 bad input.
    """
    engine = context.obj.engine()
    hosts = engine.hosts(features(lane, context.obj.host_class))
    if not hosts:
        raise FleetError(
            "no host of the fleet offers that: bumpgate fleet check without --lane lists all hosts"
        )
    names = [host.name for host in hosts]
    labels = [
        f"{name} ({host.key[:8]})" if names.count(name) > 1 else name for name, host in zip(names, hosts)
    ]
    tasks = [Task(inventory.take, (Path.cwd(),), host=host.key) for host in hosts]
    found, silent = {}, []
    for number, result in engine.run(tasks):
        if isinstance(result, Lost):
            silent.append(f"{labels[number]}: no answer: {result.why}")
        else:
            found[labels[number]] = result.value
    lines = [*inventory.differences({label: found[label] for label in labels if label in found}), *silent]
    for label, host in zip(labels, hosts):
        offered = sorted(name for name in host.features if name.startswith(("lane_", "class_")))
        typer.echo(f"{label}: {', '.join(offered) or 'no lane'}")
    for line in lines:
        typer.echo(line)
    total = f"{len(lines)} difference{'s' * (len(lines) != 1)}" if lines else "equal"
    typer.echo(f"{len(hosts)} host{'s' * (len(hosts) != 1)}: {total}")
    raise typer.Exit(Decision.UNKNOWN.value if silent else int(bool(lines)))

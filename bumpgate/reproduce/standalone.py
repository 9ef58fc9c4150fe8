"""Writes one function and all that it needs of this project as one program, by reading its source alone.

Names of other packages stay imports. Docstrings, and annotations that nothing reads, are left out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from bumpgate.core.errors import BumpgateError

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
# The frame of a program. Its exit codes: 0 right, 1 wrong, 125 neither.
HEAD = """

import sys, traceback, torch
torch.manual_seed(0)"""
TRIED_PLAIN = """
try:
    found = {name}()
except Exception:
    traceback.print_exc()
    sys.exit(125)
"""
TRIED = """
try:
    found = {name}()
except Exception as error:
    found = [f"{{type(error).__name__}}: {{error}}"]
    if {words!r} not in found[0]:
        traceback.print_exc()
        sys.exit(125)
"""
# Judged by a list of faults, by whether it raised, and by a number.
JUDGED = """
print(*(found or ["right"]), sep="\\n")
sys.exit(bool(found))
"""
RAISED = """
print(found)
sys.exit(isinstance(found, list))
"""
COUNTED = """
print({what!r}, found)
sys.exit(bool(found > {limit!r}))
"""
# A run whose result bumpgate judges: what the program returned, or raised and where.
PROBED = """

import json, sys, traceback, torch
torch.manual_seed(0)
try:
    found = {name}()
except Exception as error:
    at = traceback.extract_tb(error.__traceback__)[-1]
    _, installed, within = at.filename.rpartition("/site-packages/")
    place = (within if installed else "program") + ":" + at.name
    print("\\nRAISED", json.dumps([f"{{type(error).__name__}}: {{error}}", place]))
else:
    print("\\nRETURNED", json.dumps(found))
"""


class ProgramError(BumpgateError):
    """A program that cannot be found, or not be written as one file."""


@dataclass(frozen=True)
class Program:
    """A program without its frame.

    title: what is wrong, from its docstring.
    text: definitions and imports, formatted by ast.unparse.
    name: the function to call, "" for a program that has its own exit codes.
    """

    title: str
    text: str
    name: str


@dataclass
class Module:
    """A source file and its top-level names. package: the folder that relative imports begin from."""

    path: Path
    tree: ast.Module
    names: dict[str, ast.stmt] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Module:
        found = cls(path, ast.parse(path.read_text(encoding="utf-8")))
        for statement in found.tree.body:
            for name in _bound(statement):
                found.names[name] = statement
        return found


def load(root: Path, place: str) -> Program:
    """Load the program at `FILE.py:function`, or the script `FILE.py`. Raises ProgramError.

    root: the source tree, whose modules are inlined.
    """
    file, _, name = place.partition(":")
    path = root / file
    if not path.is_file():
        raise ProgramError(
            f"{place}: no such file below {root}; name the program with --program FILE.py:function"
        )
    try:
        if not name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            title = (ast.get_docstring(tree) or path.stem).splitlines()[0]
            if ast.get_docstring(tree) is not None:
                del tree.body[0]
            return Program(title, ast.unparse(tree), "")
        return _Inliner(root).program(path, name)
    except SyntaxError as error:
        raise ProgramError(f"{place}: {error}; write it in the Python that runs bumpgate") from None


class _Inliner:
    """Collects definitions in the order in which they must run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[Path, Module] = {}
        self.imports: dict[str, None] = {}
        self.body: list[ast.stmt] = []
        self.output: dict[tuple[Path, str], str] = {}
        self.done: set[int] = set()

    def program(self, path: Path, name: str) -> Program:
        module = self.module(path)
        entry = module.names.get(name)
        if not isinstance(entry, ast.FunctionDef):
            raise ProgramError(
                f"{path.name} has no function {name}; name another with --program FILE.py:function"
            )
        title = (ast.get_docstring(entry) or name).split("\n\n")[0].replace("\n", " ")
        entry.decorator_list = []
        self.define(module, name)
        keeps = any(
            isinstance(n, ast.AnnAssign | ast.arg) and n.annotation for s in self.body for n in ast.walk(s)
        )
        lines = ["from __future__ import annotations"] * keeps + [*self.imports]
        text = "\n".join([*lines, "", *(ast.unparse(ast.fix_missing_locations(s)) for s in self.body)])
        return Program(title, ast.unparse(ast.parse(text)), name)

    def module(self, path: Path) -> Module:
        if path not in self.modules:
            self.modules[path] = Module.read(path)
        return self.modules[path]

    def local(self, module: Module, name: str, level: int) -> Path | None:
        """The file of an imported module of this project, None for any other module."""
        base = self.root
        if level:
            base = module.path.parents[level - 1]
        place = base.joinpath(*name.split(".")) if name else base
        return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)

    def define(self, module: Module, name: str) -> str:
        """Emit what defines a top-level name, after what it needs, and return its name in the program."""
        key = module.path, name
        if key in self.output:
            return self.output[key]
        statement = module.names[name]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self.output[key] = self.imported(module, statement, name)
            return self.output[key]
        taken = set(self.output.values())
        self.output[key] = name if name not in taken else f"{name}_{len(taken)}"
        if id(statement) not in self.done:
            self.done.add(id(statement))
            self.body.append(_Rewriter(self, module).rewrite(statement))
            for follower in module.tree.body:
                if id(follower) not in self.done and _registers_on(follower) == name:
                    self.done.add(id(follower))
                    self.body.append(_Rewriter(self, module).rewrite(follower))
        return self.output[key]

    def imported(self, module: Module, statement: ast.Import | ast.ImportFrom, name: str) -> str:
        alias = next(a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name)
        if isinstance(statement, ast.ImportFrom):
            source = self.local(module, statement.module or "", statement.level)
            if source:
                within = self.module(source)
                if alias.name in within.names:
                    return self.define(within, alias.name)
                raise ProgramError(
                    f"{module.path.name}: {alias.name} of {source.name} cannot be inlined; import what it has by name"
                )
        self.imports[ast.unparse(_with_names(statement, [alias]))] = None
        return name

    def whole_module(self, module: Module, statement: ast.stmt | None, name: str) -> Module | None:
        """The project's module that a top-level name of another one means."""
        if isinstance(statement, ast.ImportFrom):
            alias = next((a for a in statement.names if (a.asname or a.name) == name), None)
            package = f"{statement.module}." if statement.module else ""
            path = self.local(module, package + alias.name, statement.level) if alias else None
            return self.module(path) if path else None
        if isinstance(statement, ast.Import):
            alias = next((a for a in statement.names if (a.asname or a.name) == name), None)
            path = self.local(module, alias.name, 0) if alias else None
            return self.module(path) if path else None
        return None


class _Rewriter(ast.NodeTransformer):
    """Makes a top-level statement independent of its module, and emits what it needs first."""

    def __init__(self, inliner: _Inliner, module: Module) -> None:
        self.inliner, self.module = inliner, module
        self.inner: dict[str, ast.ImportFrom] = {}

    def rewrite(self, statement: ast.stmt) -> ast.stmt:
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and self.inliner.local(
                self.module, node.module or "", node.level
            ):
                self.inner |= {a.asname or a.name: node for a in node.names}
        found = self.visit(statement)
        assert isinstance(found, ast.stmt)
        return found

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return ast.Pass() if node in self.inner.values() else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name):
            statement = self.module.names.get(node.value.id)
            whole = self.inliner.whole_module(self.module, statement, node.value.id)
            if whole and node.attr in whole.names:
                return ast.Name(self.inliner.define(whole, node.attr), node.ctx)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.inner:
            return ast.Name(self.inliner.imported(self.module, self.inner[node.id], node.id), node.ctx)
        if node.id in self.module.names:
            return ast.Name(self.inliner.define(self.module, node.id), node.ctx)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not node.decorator_list:
            node.returns = None
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                argument.annotation = None
            for star in (arguments.vararg, arguments.kwarg):
                if star:
                    star.annotation = None
            node.body = [_plain(s) for s in node.body]
        return self.without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        fields = any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
        if not node.decorator_list and not fields:
            node.body = [_plain(s) for s in node.body]
        return self.without_docstring(node)

    def without_docstring(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        found = self.generic_visit(node)
        if isinstance(found, ast.FunctionDef | ast.ClassDef) and found.name in self.module.names:
            found.name = self.inliner.output.get((self.module.path, found.name), found.name)
        return found


def _registers_on(statement: ast.stmt) -> str:
    """The name whose method a top-level statement calls, as `@op.register_fake` and `op.register_autograd(...)` do."""
    calls: list[ast.expr] = statement.decorator_list if isinstance(statement, FunctionNode) else []
    if isinstance(statement, ast.Expr):
        calls = [statement.value]
    for call in calls:
        method = call.func if isinstance(call, ast.Call) else call
        if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name):
            return method.value.id
    return ""


def _plain(statement: ast.stmt) -> ast.stmt:
    """An assignment without its annotation."""
    if isinstance(statement, ast.AnnAssign) and statement.value:
        return ast.Assign([statement.target], statement.value, lineno=statement.lineno)
    return statement


def _bound(statement: ast.stmt) -> list[str]:
    """The top-level names that a statement binds."""
    if isinstance(statement, FunctionNode | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            return []
        return [a.asname or a.name.partition(".")[0] for a in statement.names]
    targets = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [target.id for target in targets]


def _with_names(statement: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import(names)
    return ast.ImportFrom(statement.module, names, statement.level)

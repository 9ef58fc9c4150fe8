"""Commands whose parameters are the fields of a dataclass, so that each option is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a Typer command whose last parameter is an instance of the dataclass `options`.

    A field that is `Annotated` with an option becomes a parameter of the command; other fields keep their defaults. A
    field of type `tuple[str, ...]` is a repeatable option. The command's other parameters come first.
    """
    fields = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_repeatable(parameter.annotation))
        for parameter in inspect.signature(options, eval_str=True).parameters.values()
        if get_origin(parameter.annotation) is Annotated
    ]

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        own = [*inspect.signature(run, eval_str=True).parameters.values()][:-1]

        @wraps(run)
        def command(**values: Any) -> None:
            first = [values.pop(parameter.name) for parameter in own]
            run(*first, options(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}))

        command.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *fields)}
        return command

    return decorate


def _repeatable(annotation: Any) -> Any:
    kind, option = get_args(annotation)
    return Annotated[list[str], option] if kind == tuple[str, ...] else annotation

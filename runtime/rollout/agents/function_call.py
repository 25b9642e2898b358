"""Whether a function can be called as it will be, as far as its module's text shows it.

Nothing of the text is run. What decorators make of a function, or what binds its name once more,
it does not show: then nothing is said.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from inspect import Parameter, Signature
from typing import Final, NamedTuple

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_PLAIN: Final = (
    ast.BinOp, ast.Compare, ast.Constant, ast.Dict, ast.JoinedStr, ast.List, ast.ListComp,
    ast.Tuple, ast.UnaryOp,
)  # fmt: skip
"""Expressions that give nothing to await."""
_PLAIN_CALLS: Final = ("abs", "bool", "float", "int", "len", "max", "min", "round", "str", "sum")


class Calling(NamedTuple):
    """How a function is called.

    Attributes:
        positional: what these arguments are.
        keywords: of arguments; there may be more.
        is_awaited: what it returns is.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    is_awaited: bool = False


AGENT_CALL: Final = Calling(positional=("ctx", "sample"), is_awaited=True)
REWARD_CALL: Final = Calling(keywords=("prompts", "completions"))


def call_problem(module: ast.Module, path: str, name: str, calling: Calling) -> str:
    """What is surely wrong with the function of that name, and how to mend it; else "".

    Args:
        path: the module's, for messages.
    """
    binding = [node for node in _in_scope(module) if name in _names_bound_by(node)]
    if len(binding) != 1 or not isinstance(binding[0], _Function) or binding[0].decorator_list:
        return ""
    function = binding[0]
    place = f"{path}:{function.lineno}"
    try:
        if calling.keywords:
            _signature(function.args).bind_partial(**dict.fromkeys(calling.keywords))
        else:
            _signature(function.args).bind(*calling.positional)
    except TypeError as error:
        wanted = ", ".join([*calling.positional, *(f"{word}=" for word in calling.keywords)])
        return (
            f"{place}: {name}({ast.unparse(function.args)}) is called as {name}({wanted}): {error}"
        )
    if calling.is_awaited and not _may_be_awaited(function):
        return f"{place}: {name} is no async function; write `async def {name}`"
    return ""


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node, without what functions and classes have inside."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _in_scope(child)


def _names_bound_by(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Name(ctx=ast.Store() | ast.Del()):
            return [node.id]
        case ast.alias():
            return [node.asname or node.name.partition(".")[0]]
        case _:
            return []


def _signature(arguments: ast.arguments) -> Signature:
    num_only = len(arguments.posonlyargs)
    by_place = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_place) - len(arguments.defaults)
    parameters = [
        Parameter(
            a.arg,
            Parameter.POSITIONAL_ONLY if idx < num_only else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if idx < num_required else None,
        )
        for idx, a in enumerate(by_place)
    ]
    if arguments.vararg:
        parameters.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = Parameter.empty if default is None else None
        parameters.append(Parameter(a.arg, Parameter.KEYWORD_ONLY, default=value))
    if arguments.kwarg:
        parameters.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def _may_be_awaited(function: _Function) -> bool:
    """Whether a call may give what can be awaited: a plain function may hand it on."""
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    nodes = list(_in_scope(function))
    names = _plain_names(nodes)
    returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value]
    return not all(_is_plain(value, names) for value in returned)


def _plain_names(nodes: list[ast.AST]) -> set[str]:
    """Names of a scope that are given plain values only."""
    bound, plain = Counter[str](), Counter[str]()
    for node in nodes:
        bound.update(_names_bound_by(node))
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_plain(value, set()):
                plain[name] += 1
            case ast.AugAssign(target=ast.Name(id=name)):
                plain[name] += 1
            case _:
                pass
    return {name for name in bound if bound[name] == plain[name]}


def _is_plain(value: ast.expr, names: set[str]) -> bool:
    match value:
        case ast.IfExp():
            return _is_plain(value.body, names) and _is_plain(value.orelse, names)
        case ast.Call(func=ast.Name(id=called)):
            return called in _PLAIN_CALLS
        case ast.Name(id=name):
            return name in names
        case _:
            return isinstance(value, _PLAIN)

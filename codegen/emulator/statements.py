"""Split the body of a PTX function into statements and resolve the names that its `{ }` scopes declare."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import PtxError

_STATEMENT = re.compile(r"\s*(?:([A-Za-z_$%][\w$]*)\s*:(?!:)|([{}])|([^;{}\s][^;]*?)\s*;)")
_NAME = re.compile(r"(?<![\w$.])%?[A-Za-z_$][\w$]*")
_RANGE = re.compile(r"(.*)<(\d+)>$")


@dataclass(frozen=True, slots=True)
class Statement:
    """A label (`kind="label"`), a directive or an instruction, with the line of the PTX text on which it starts."""

    kind: str
    text: str
    line: int


def strip_comments(text: str) -> str:
    """Blank out comments and debug lines and keep every line break, so that line numbers stay those of the text."""
    if "/*" in text:
        text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found.group(0).count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    # .loc and .file end at the line end, not at a semicolon: left in, they would swallow the next instruction
    return re.sub(r"^[ \t]*\.(?:loc|file|pragma)\b[^\n]*$", "", text, flags=re.M)


@dataclass(slots=True)
class _Scope:
    """Names declared between one pair of braces, mapped to names unique in the kernel."""

    number: int
    names: dict[str, str]


def declared_names(declaration: str) -> tuple[str, list[str]]:
    """The type and the names of a `.reg` directive: `.reg .b32 %r<3>` gives `("b32", ["%r0", "%r1", "%r2"])`."""
    words = declaration.split(None, 2)
    if len(words) < 3 or not words[1].startswith("."):
        raise PtxError(f"cannot read the register declaration {declaration!r}")
    names: list[str] = []
    for item in words[2].split(","):
        item = item.strip()
        found = _RANGE.match(item)
        names += [f"{found.group(1)}{i}" for i in range(int(found.group(2)))] if found else [item]
    return words[1][1:], names


def split_statements(body: str, first_line: int) -> list[Statement]:
    """All statements of a body, names of inner scopes made unique: `L` of the third scope becomes `L$3`."""
    raw = _tokens(body, first_line)
    scopes = [_Scope(0, {})]
    scope_of_open = _scopes_by_opening(raw)
    statements: list[Statement] = []
    for position, (kind, text, line) in enumerate(raw):
        if kind == "{":
            scopes.append(scope_of_open[position])
        elif kind == "}":
            scopes.pop()
        elif len(scopes) == 1:
            statements.append(Statement(kind, text, line))
        else:
            statements.append(Statement(kind, _rename(text, scopes), line))
    return statements


def _tokens(body: str, first_line: int) -> list[tuple[str, str, int]]:
    tokens: list[tuple[str, str, int]] = []
    position, line = 0, first_line
    end = len(body.rstrip())
    match = _STATEMENT.match
    while position < end:
        found = match(body, position)
        if found is None:
            raise PtxError(f"PTX line {line}: cannot read {body[position : position + 60].strip()!r}")
        group = found.lastindex or 0
        start = found.start(group)
        line += body.count("\n", position, start)
        text = found.group(group)
        tokens.append((("label", text, "statement")[group - 1], text, line))
        line += body.count("\n", start, found.end())
        position = found.end()
    return tokens


def _scopes_by_opening(raw: list[tuple[str, str, int]]) -> dict[int, _Scope]:
    """What each scope declares; collected first, because a branch may name a label that comes later in its scope."""
    scopes: dict[int, _Scope] = {}
    stack: list[_Scope] = []
    for position, (kind, text, line) in enumerate(raw):
        if kind == "{":
            scopes[position] = _Scope(len(scopes) + 1, {})
            stack.append(scopes[position])
        elif kind == "}":
            if not stack:
                raise PtxError(f"PTX line {line}: a brace closes no scope")
            stack.pop()
        elif stack:
            names = [text] if kind == "label" else []
            if text.startswith(".reg"):
                names = declared_names(text)[1]
            elif text.startswith((".shared", ".local")):
                names = re.findall(r"([\w$]+)\s*(?:\[\d*\])?$", text)
            stack[-1].names.update({name: f"{name}${stack[-1].number}" for name in names})
    if stack:
        raise PtxError("a scope is never closed")
    return scopes


def _rename(text: str, scopes: list[_Scope]) -> str:
    if text.startswith(".reg"):
        type_name, names = declared_names(text)
        return f".reg .{type_name} " + ", ".join(scopes[-1].names[name] for name in names)

    def unique(found: re.Match[str]) -> str:
        name = found.group(0)
        for scope in reversed(scopes):
            if name in scope.names:
                return scope.names[name]
        return name

    return _NAME.sub(unique, text)

"""`ScoreSource`: a ScoreMod as the compiler sees it, the user's expressions word for word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from cupyflash._cuda.params import SCORE_PARAMS
from cupyflash.errors import UnsupportedError
from cupyflash.score_mod import ScoreMod

__all__ = ["ScoreSource", "definitions"]


_FLOATS = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float", "float64": "double"}
_INTEGERS = {
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
}
_DTYPES = _FLOATS | _INTEGERS

_ARGUMENTS = ("score", "b", "h", "i", "j")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What could end the generated function or begin a directive, and what hides such a thing.
_FORBIDDEN = re.compile(r"[;{}#\\\"'`@$]|//|/\*|<%|%>|%:|[^\n\t -~]")
_BRACKETS = {")": "(", "]": "["}


@dataclass(frozen=True)
class ScoreSource:
    """Expressions and the dtypes of the named arrays; without their values, it can be hashed."""

    forward: str
    backward: str | None
    arrays: tuple[tuple[str, str], ...]  # name, dtype; the place is the slot

    @classmethod
    def of(cls, score_mod: ScoreMod) -> ScoreSource:
        """Return the source of a `ScoreMod` whose params are arrays.

        Raises
        ------
        ValueError
            An expression is more or less than one expression, or a name is none.
        TypeError
            An array has a dtype that kernels do not read.
        UnsupportedError
            There are more than `SCORE_PARAMS` arrays.
        """
        for name in ("forward", "backward"):
            _require_expression(getattr(score_mod, name), name)
        arrays = tuple((name, array.dtype.name) for name, array in score_mod.params.items())
        for (name, dtype), array in zip(arrays, score_mod.params.values(), strict=True):
            _require_name(name)
            if dtype not in _DTYPES or not array.dtype.isnative:
                raise TypeError(
                    f"score_mod.params[{name!r}] has dtype {array.dtype}; expected one of "
                    f"{', '.join(_DTYPES)} in native byte order"
                )
        if len(score_mod.params) > SCORE_PARAMS:
            raise UnsupportedError(
                f"score_mod has {len(score_mod.params)} params; GPU engines pass up to "
                f"{SCORE_PARAMS}: concatenate some into one array"
            )
        return cls(score_mod.forward, score_mod.backward, arrays)

    @property
    def floating(self) -> tuple[int, ...]:
        """Slots of the arrays that have gradients."""
        return tuple(slot for slot, (_, dtype) in enumerate(self.arrays) if dtype in _FLOATS)

    @property
    def definition(self) -> str:
        """The C++ of ``UserScore<true>``, as kernels/attention/score_mod.cuh asks for it."""
        floating = sum(1 << slot for slot in self.floating)
        functions = [self._function("forward", self.forward)]
        if self.backward is not None:
            functions.append(self._function("backward", self.backward))
        return "\n".join(
            (
                "template <>",
                "struct UserScore<true> {",
                f"  static constexpr int params = {len(self.arrays)};",
                f"  static constexpr unsigned floating = {floating};",
                f"  static constexpr bool has_backward = {str(self.backward is not None).lower()};",
                *functions,
                "};",
            )
        )

    def _function(self, name: str, expression: str) -> str:
        """Return a function that yields the expression.

        The closing bracket stands in the user's last line, so that an error there shows it.
        """
        arrays = (
            f"    [[maybe_unused]] const auto {array} = "
            f"cupyflash_arrays.template {_reader(slot, dtype)}();\n"
            for slot, (array, dtype) in enumerate(self.arrays)
        )
        return (
            f"  __device__ static auto {name}(const auto score, const int b, const int h,\n"
            "      const int i, const int j, const auto& cupyflash_arrays) {\n"
            f"{''.join(arrays)}    return (\n"
            f'#line 1 "score_mod.{name}"\n{expression})\n#line 1 "after score_mod.{name}"\n'
            "    ;\n  }"
        )


def definitions(score_mod: ScoreSource | None) -> tuple[str, ...]:
    """Return what a stub says of a score_mod, if there is one."""
    return () if score_mod is None else (score_mod.definition,)


def _reader(slot: int, dtype: str) -> str:
    if dtype in _FLOATS:
        return f"floats<{slot}, {_FLOATS[dtype]}>"
    return f"integers<{slot}, {_INTEGERS[dtype]}>"


def _require_name(name: str) -> None:
    if name in _ARGUMENTS or not _NAME.fullmatch(name):
        raise ValueError(
            f"score_mod.params has the name {name!r}; expected a C++ name other than "
            f"{', '.join(_ARGUMENTS)}, which expressions have already"
        )


@lru_cache(maxsize=256)
def _require_expression(expression: str | None, name: str) -> None:
    """Refuse what would not stay between the brackets of the generated function.

    Whether it is C++ is the compiler's to say.
    """
    if expression is None:
        return
    if not expression.strip():
        raise ValueError(f"score_mod.{name} is empty; expected a CUDA expression, such as 'score'")
    found = _FORBIDDEN.search(expression)
    if found:
        raise _not_one(expression, name, found.start(), f"has {found[0]!r}")
    opened: list[int] = []
    for position, character in enumerate(expression):
        if character in "([":
            opened.append(position)
        elif character in ")]":
            if not opened or expression[opened.pop()] != _BRACKETS[character]:
                raise _not_one(expression, name, position, f"closes {character!r} unopened")
        elif character == "," and not opened:
            raise _not_one(expression, name, position, "has a comma outside of brackets")
    if opened:
        raise _not_one(expression, name, opened[-1], "leaves a bracket open")


def _not_one(expression: str, name: str, position: int, complaint: str) -> ValueError:
    """Return an error that shows the user's own line."""
    before = expression[:position]
    row = before.count("\n")
    line = expression.split("\n")[row]
    column = len(before.rpartition("\n")[2])
    return ValueError(
        f"score_mod.{name}({row + 1}) {complaint}; expected one CUDA expression, without "
        f"statements, comments and strings\n  {line}\n  {' ' * column}^"
    )

"""From a ScoreMod to CUDA text: what is refused, and that errors show the user's own line."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupyflash import CompileError, ScoreMod, UnsupportedError
from cupyflash._cuda.compiler import compile_source
from cupyflash._cuda.kernel import stub
from cupyflash._cuda.params import SCORE_PARAMS
from cupyflash._cuda.score_source import ScoreSource

ENTRY = """\
struct Arrays {{ const void* data[8]; int64 sizes[8]; void* sums[8]; {T}* x; }};
extern "C" __global__ void use_score(const __grid_constant__ Arrays p) {{
  const ScoreFunction<{T}, true> function{{{{p.data, p.sizes}}, 0, int(blockIdx.x)}};
  ScoreArrayGradients<{T}, true, {exact}> gradients(p.sums);
  const {T} score = p.x[threadIdx.x];
  p.x[threadIdx.x] = function.value(score, 1, threadIdx.x) + function.factor(score, 1, 2);
  gradients.add(function, score, score, 1, threadIdx.x);
  gradients.finish();
}}"""

TABLE = np.zeros((2, 9), np.float32)


def compile_mod(mod: ScoreMod, accumulator: str = "float", exact: str = "false"):
    entry = ENTRY.format(T=accumulator, exact=exact)
    source = stub("attention/score_mod.cuh", ScoreSource.of(mod).definition, entry)
    compilation = compile_source(source, "sm_80")
    assert "warning" not in compilation.log
    return compilation.entries["use_score"]


@pytest.mark.parametrize("exact", ["false", "true"])
@pytest.mark.parametrize("accumulator", ["float", "double"])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("score", None),
        ("score + table[h * 9 + j - i]", "1"),
        ("table[0] * score *\n  (i > j ? table[i] : table[j])", None),
        ("i == j ? -INFINITY : fmaxf(score, 0.0f) + min(table[b], 1.0f)", None),
        ("score - 0.5 * logf(1 + abs(i - j))", "1.0"),
        ("tanh(score / 30) * 30 + max(i, j) + exp2f(table[0]) * flags[i]", None),
        ("\n  score * 2\n", "\n 2\n"),
    ],
)
def test_compiles(forward, backward, accumulator, exact):
    mod = ScoreMod(forward, backward, {"table": TABLE, "flags": np.zeros(5, bool)})
    usage = compile_mod(mod, accumulator, exact)
    assert (usage.stack, usage.spill_stores) == (0, 0)


@pytest.mark.parametrize(
    "dtype",
    ["float16", ml_dtypes.bfloat16, "float32", "float64", "bool", "int8", "uint8", "int16",
     "uint16", "int32", "uint32", "int64", "uint64"],
)  # fmt: skip
def test_arrays_of_any_dtype(dtype):
    array = np.zeros(4, dtype)
    for accumulator in ("float", "double"):
        compile_mod(ScoreMod("score + array[j]", None, {"array": array}), accumulator)


def test_unused_gradients_cost_nothing():
    """A table's gradient needs no score, and integers have no gradient at all."""
    plain = compile_mod(
        ScoreMod("ids[i] == ids[j] ? score : -INFINITY", "1", {"ids": TABLE.view("i4")})
    )
    assert plain.registers <= 32


@pytest.mark.parametrize(
    ("expression", "line", "reason"),
    [
        ("scor + 1", "scor + 1", '"scor" is undefined'),
        ("score +\n  2 * tabel[h]", "2 * tabel[h]", '"tabel" is undefined'),
        ("score + ", "score + ", "expected an expression"),
        ("score = 3", "score = 3", "modifiable lvalue"),
        ("return score", "return score", "expected an expression"),
        ("score + table", "score + table", "no operator"),
        ("score(2)", "score(2)", "function type"),
    ],
)
def test_the_compilers_errors_show_the_users_line(expression, line, reason):
    row = expression.count("\n") + 1
    for mod in (ScoreMod(expression, None, {"table": TABLE}),
                ScoreMod("score", expression, {"table": TABLE})):  # fmt: skip
        name = "forward" if mod.backward is None else "backward"
        with pytest.raises(CompileError) as caught:
            compile_mod(mod)
        assert f"score_mod.{name}({row}): error" in str(caught.value)
        assert line in str(caught.value)
        assert reason in str(caught.value)


def test_a_cast_that_would_lose_the_derivative():
    compile_mod(ScoreMod("float(score)", "1"))
    with pytest.raises(CompileError, match="float\\(score\\)"):
        compile_mod(ScoreMod("float(score)"))


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("score, 1", "comma"),
        ("score) + (1", "unopened"),
        ("(score + 1", "open"),
        ("table[(0])", "unopened"),
        ("score; b", "';'"),
        ("score); } __device__ void f() { (1", "unopened|';'"),
        ("[] { return 1.0f; }()", "'{'"),
        ("<% score %>", "'<%'"),
        ("score\n#define b 3", "'#'"),
        ("score\n%: define b 3", "'%:'"),
        ("score // half", "'//'"),
        ("score /* half", r"'/\*'"),
        ("score \\\n", "has"),
        ("sizeof(\"x\")", "has"),
        ("score + '1'", "has"),
        ("score\0", "has"),
        ("scor\u00e9", "has"),
        ("score +\r 1", "has"),
    ],
)  # fmt: skip
def test_more_or_less_than_an_expression(expression, complaint):
    for mod in (ScoreMod(expression), ScoreMod("score", expression)):
        name = "forward" if mod.backward is None else "backward"
        with pytest.raises(ValueError, match=complaint) as caught:
            ScoreSource.of(mod)
        assert f"score_mod.{name}" in str(caught.value)


def test_the_complaint_points_at_the_place():
    with pytest.raises(ValueError) as caught:
        ScoreSource.of(ScoreMod("score +\n  table[h]; b"))
    assert str(caught.value).endswith("\n  " + "  table[h]; b" + "\n  " + " " * 10 + "^")


@pytest.mark.parametrize(
    "name", ["score", "b", "h", "i", "j", "2x", "", "a b", "a-b", "\u00e9", "x\n"]
)
def test_names_that_cannot_be(name):
    with pytest.raises(ValueError, match=r"score_mod\.params"):
        ScoreSource.of(ScoreMod("score", params={name: TABLE}))


@pytest.mark.parametrize("name", ["int", "class", "return", "cupyflash_arrays"])
def test_names_that_the_compiler_has(name):
    with pytest.raises(CompileError, match=name):
        compile_mod(ScoreMod("score", params={name: TABLE}))


def test_names_that_look_like_the_generated_ones_are_free():
    names = ("T", "Dual", "params", "forward", "element", "floats", "value")
    expression = "score + " + " + ".join(f"{name}[0]" for name in names)
    compile_mod(ScoreMod(expression, params=dict.fromkeys(names, TABLE)))


@pytest.mark.parametrize("dtype", ["complex64", ">f4", "datetime64[s]"])
def test_dtypes_that_kernels_do_not_read(dtype):
    with pytest.raises(TypeError, match="array"):
        ScoreSource.of(ScoreMod("score", params={"array": np.zeros(3, dtype)}))


def test_more_arrays_than_slots():
    params = {f"a{k}": TABLE for k in range(SCORE_PARAMS)}
    ScoreSource.of(ScoreMod("score", params=params))
    with pytest.raises(UnsupportedError, match="9 params"):
        ScoreSource.of(ScoreMod("score", params=params | {"more": TABLE}))


def test_sources_are_values():
    def source(scale: float) -> ScoreSource:
        return ScoreSource.of(ScoreMod("score", None, {"table": TABLE * scale}))

    assert source(1) == source(2)
    assert hash(source(1)) == hash(source(2))
    assert source(1) != ScoreSource.of(ScoreMod("score", None, {"table": TABLE.astype("f8")}))

"""Rules of the repository that no linter knows, each a pure function from text to problems, each shown to fail.

A guard returns problems as sentences, an empty list when all is well. RULES binds each guard to the files it reads;
SABOTAGE holds, for each, an input that it must refuse, and a test asks that no guard is without one.
"""

import ast
import fnmatch
import importlib
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import sqlstreams.errors
from sqlstreams.errors import SQLStreamsError

ROOT = Path(__file__).parents[2]
ALLOWED_AT_TOP = frozenset(
    (
        *(
            "pyproject.toml",
            "README.md",
            "CHANGELOG.md",
            "LICENSE",
            "Makefile",
            ".gitignore",
            ".flake8",
            ".ci",
        ),
        *("actors", "sqlstreams", "tests", "benchmarks", "docs"),
    )
)
SCENARIOS = "docs/reference/scenarios.md"
BRIDGE = "sqlstreams/postgres/bridge.py"
BARE_LOOP = (
    "benchmarks/variants/baseline_consumer.py"  # the yardstick: what bare trio-asyncio reaches, without us
)

Texts = Mapping[str, str]  # path below the root -> text
Guard = Callable[[Texts], list[str]]


# What the guards read.


@cache
def repository() -> Texts:
    """Every text file that git would track: all but .git and what .gitignore names."""
    ignored = [
        line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split() if not line.startswith("#")
    ]
    ignored.append(".git")

    def walk(folder: Path) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if any(fnmatch.fnmatch(entry.name, pattern) for pattern in ignored):
                continue
            if entry.is_dir():
                yield from walk(entry)
            else:
                yield entry

    return {str(path.relative_to(ROOT)): path.read_text("utf-8", errors="replace") for path in walk(ROOT)}


def below(texts: Texts, folders: str, suffix: str = ".py") -> Texts:
    """Those of `texts` in one of `folders` whose name ends in `suffix`."""
    starts = tuple(f"{folder}/" for folder in folders.split())
    return {path: text for path, text in texts.items() if path.startswith(starts) and path.endswith(suffix)}


def comments_of(source: str) -> dict[int, str]:
    """The comment of each line that has one."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def comments_at(source: str, comments: Mapping[int, str], first: int, last: int) -> str:
    """The comments on the lines from `first` to `last`, and the block of comments right above them."""
    lines = source.splitlines()
    while first > 1 and lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return "\n".join(comments.get(line, "") for line in range(first, last + 1))


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and module of every absolute import, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


# The guards.


def top_level(texts: Texts) -> list[str]:
    """The top level holds what was agreed, so that a newcomer sees the product and not the machinery."""
    entries = {path.split("/")[0] for path in texts}
    strangers = [f"{entry}: not an agreed top-level entry" for entry in sorted(entries - ALLOWED_AT_TOP)]
    return strangers + [f"{entry}: missing at the top level" for entry in sorted(ALLOWED_AT_TOP - entries)]


def bounded_shields(texts: Texts) -> list[str]:
    """A shield without a bound can hang a shutdown for ever; a comment `# bounded: …` says what bounds it."""
    problems = []
    for path, source in texts.items():
        comments = comments_of(source)
        tree = ast.parse(source)
        headers = {  # a comment anywhere in `with (…):` counts, since ruff moves it to the last line
            id(item.context_expr): (node.lineno, node.body[0].lineno - 1)
            for node in ast.walk(tree)
            if isinstance(node, ast.With | ast.AsyncWith) and node.body[0].lineno > node.lineno
            for item in node.items
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.expr | ast.stmt) and is_shield(node):
                first, last = headers.get(id(node), (node.lineno, node.end_lineno or node.lineno))
                if not re.search(r"# bounded: \w", comments_at(source, comments, first, last)):
                    problems.append(f"{path}:{node.lineno}: a shield without a comment `# bounded: …`")
    return problems


def is_shield(node: ast.expr | ast.stmt) -> bool:
    """Whether `node` is `CancelScope(shield=…)` or `….shield = …`, with anything but False."""
    match node:
        case ast.Call(func=ast.Name(id="CancelScope") | ast.Attribute(attr="CancelScope"), keywords=keywords):
            values = [keyword.value for keyword in keywords if keyword.arg == "shield"]
        case ast.Assign(targets=targets, value=value):
            values = [
                value for target in targets if isinstance(target, ast.Attribute) and target.attr == "shield"
            ]
        case _:
            return False
    return any(not (isinstance(value, ast.Constant) and value.value is False) for value in values)


def actors_stand_alone(texts: Texts) -> list[str]:
    """`actors` is useful to any trio program: trio and the standard library are all it knows."""
    allowed = sys.stdlib_module_names | {"trio", "actors"}
    return [
        f"{path}:{line}: imports {module}"
        for path, source in texts.items()
        for line, module in imports_of(ast.parse(source))
        if module.split(".")[0] not in allowed
    ]


def one_bridge(texts: Texts) -> list[str]:
    """Importing trio_asyncio patches asyncio for the whole process, and its rules are kept in one file."""
    return [
        f"{path}:{line}: imports {module}; only {BRIDGE} may"
        for path, source in texts.items()
        for line, module in imports_of(ast.parse(source))
        if module.split(".")[0] == "trio_asyncio" and path not in (BRIDGE, BARE_LOOP)
    ]


def public_names(texts: Texts) -> list[str]:
    """`__all__` is the public API: literal, sorted as ruff sorts it, without a name missing or invented."""
    problems = []
    for path, source in texts.items():
        declared: list[str] | None = None
        bound: set[str] = set()
        for node in ast.parse(source).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                    declared = ast.literal_eval(value)
                case ast.ImportFrom(level=level, module=module, names=names):
                    if level or (module or "").split(".")[0] in ("actors", "sqlstreams"):
                        bound.update(alias.asname or alias.name for alias in names)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    bound.add(name)
        if declared is None:
            problems.append(f"{path}: no __all__")
            continue
        expected = sorted(declared, key=ruff_order)
        if declared != expected:
            problems.append(f"{path}: __all__ is not sorted")
        problems += [
            f"{path}: __all__ has {name} twice" for name, count in Counter(declared).items() if count > 1
        ]
        public = {name for name in bound if not name.startswith("_")}
        problems += [f"{path}: {name} is not in __all__" for name in sorted(public - set(declared))]
        problems += [f"{path}: {name} is in __all__ only" for name in sorted(set(declared) - bound)]
    return problems


def ruff_order(name: str) -> tuple[bool, bool, str]:
    """CONSTANTS, then Classes, then functions: RUF022, so that the two never disagree."""
    return not (len(name) > 1 and name.isupper()), not name[0].isupper(), name


FORBIDDEN_SQL = {
    r"\bselect\s+(\w+\.)?\*": "select * (columns by name)",
    r"\breturning\s+(\w+\.)?\*": "returning * (columns by name)",
    r"\b(now|transaction_timestamp|statement_timestamp)\s*\(": "a clock of its own (only clock())",
    r"\b(current_timestamp|localtimestamp|current_time|localtime|current_date)\b": "a clock of its own (only clock())",
}


def plain_sql(texts: Texts) -> list[str]:
    """Columns have names, so that a later column breaks nothing; instants come from one function that tests replace."""
    problems = []
    for path, text in texts.items():
        code = re.sub(
            r"--[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.DOTALL
        )
        for pattern, what in FORBIDDEN_SQL.items():
            starts = (found.start() for found in re.finditer(pattern, code, re.IGNORECASE))
            problems += [f"{path}:{code.count(chr(10), 0, start) + 1}: {what}" for start in starts]
    return problems


LOCK_FILES = r"(^|/)((uv|poetry|Pipfile|pdm|pixi)\.lock|pylock(\..+)?\.toml|package-lock\.json)$"
MACHINE = {
    r"/(root|home|Users)/[\w.]": "a path of one machine",
    r"https?://[^\s\"'<>]+/(simple|packages)/": "the address of a package index",
    r"\b(pypi\.org|pythonhosted\.org|npmjs\.org)\b": "the host of a package index",
    r"--(extra-)?index-url\b": "the choice of a package index",
    re.escape(f"{ROOT}/"): "the path of this checkout",
}


def stands_alone(texts: Texts) -> list[str]:
    """A clone works on any machine: nothing fixes package versions, an index, or a path of where it was written."""
    problems = [f"{path}: a lock file" for path in texts if re.search(LOCK_FILES, path)]
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            problems += [
                f"{path}:{number}: {what}" for pattern, what in MACHINE.items() if re.search(pattern, line)
            ]
    return problems


def known_scenarios(texts: Texts) -> list[str]:
    """A test named for a scenario proves one that is in the list, and the list has each id once."""
    ids = Counter(re.findall(r"^- \*\*([A-Z]\d+)\*\*", texts.get(SCENARIOS, ""), re.MULTILINE))
    problems = [
        f"{SCENARIOS}: {scenario} stands there {count} times" for scenario, count in ids.items() if count > 1
    ]
    for path, line, name in named_tests(texts):
        leading = re.match(r"test_((?:[a-z]\d{1,2}_)*)", name)
        named = {part for part in (leading[1] if leading else "").upper().split("_") if part}
        problems += [
            f"{path}:{line}: {name}: {SCENARIOS} has no {unknown}" for unknown in sorted(named - set(ids))
        ]
    return problems


def named_tests(texts: Texts) -> Iterator[tuple[str, int, str]]:
    """Path, line and name of every test function."""
    for path, source in below(texts, "tests").items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path, node.lineno, node.name


VIRTUAL_CLOCK = ("tests/actors/", "tests/simulation/")  # there trio's sleep takes no time
VIRTUAL_FIXTURES = {"autojump_clock", "mock_clock"}


def reasoned_sleeps(texts: Texts) -> list[str]:
    """A test that sleeps to be safe is slow and still fails at times; one that must sleep says `# because …`."""
    problems = []
    for path, source in texts.items():
        tree = ast.parse(source)
        comments = comments_of(source)
        virtual = {
            id(inner)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            and VIRTUAL_FIXTURES & {argument.arg for argument in function.args.args}
            for inner in ast.walk(function)
        }
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="trio" | "time" | "asyncio" as module), attr="sleep")
                ):
                    pass
                case _:
                    continue
            if module == "trio" and (path.startswith(VIRTUAL_CLOCK) or id(node) in virtual):
                continue
            if isinstance(node.args[0], ast.Constant) and node.args[0].value == 0:
                continue  # a checkpoint
            if not re.search(
                r"# (because|real time|why)\b",
                comments_at(source, comments, node.lineno, node.end_lineno or 0),
            ):
                problems.append(f"{path}:{node.lineno}: {module}.sleep without `# because …`")
    return problems


RULES: dict[Guard, Callable[[Texts], Texts]] = {
    top_level: lambda texts: texts,
    bounded_shields: lambda texts: below(texts, "actors sqlstreams tests benchmarks"),
    actors_stand_alone: lambda texts: below(texts, "actors"),
    one_bridge: lambda texts: below(texts, "actors sqlstreams benchmarks"),
    public_names: lambda texts: {
        path: texts[path] for path in ("actors/__init__.py", "sqlstreams/__init__.py")
    },
    plain_sql: lambda texts: below(texts, "sqlstreams", ".sql"),
    stands_alone: lambda texts: texts,
    known_scenarios: lambda texts: {SCENARIOS: texts[SCENARIOS]} | dict(below(texts, "tests")),
    reasoned_sleeps: lambda texts: below(texts, "tests"),
}

SABOTAGE: dict[Guard, list[Texts]] = {
    top_level: [
        dict.fromkeys([*ALLOWED_AT_TOP, "scripts/tool.py"], ""),
        dict.fromkeys(ALLOWED_AT_TOP - {"LICENSE"}, ""),
    ],
    bounded_shields: [
        {"a.py": "with trio.CancelScope(shield=True):\n    pass"},
        {"a.py": "with CancelScope(deadline=3, shield=True):  # bounded:\n    pass"},
        {"a.py": "# bounded: this one is\n\nscope.shield = True"},
        {"a.py": "with CancelScope(shield=True):\n    pass  # bounded: the comment of another line"},
        {"a.py": "scope.shield = wanted"},
        {"a.py": "text = '# bounded: only in a string'; scope.shield = True"},
    ],
    actors_stand_alone: [
        {"actors/a.py": "import msgspec"},
        {"actors/a.py": "def f():\n    from sqlstreams.errors import LeaseLost"},
    ],
    one_bridge: [
        {"sqlstreams/postgres/pool.py": "import trio_asyncio"},
        {"sqlstreams/client.py": "from trio_asyncio import open_loop"},
    ],
    public_names: [
        {"a.py": "from .b import B as B"},
        {"a.py": "from .b import B, c\n__all__ = ['c', 'B']"},
        {"a.py": "from .b import B, c\n__all__ = ['B']"},
        {"a.py": "from .b import B\n__all__ = ['B', 'Gone']"},
        {"a.py": "def f(): ...\n__all__ = ['f', 'f']"},
    ],
    plain_sql: [
        {"a.sql": "select *\nfrom t"},
        {"a.sql": "SELECT t.* FROM t"},
        {"a.sql": "insert into t (a) values (1) returning *"},
        {"a.sql": "update t set at = now()"},
        {"a.sql": "update t set at = current_timestamp"},
    ],
    stands_alone: [
        {"uv.lock": ""},
        {"docs/a.md": "cd /ho" + "me/me/project"},
        {"Makefile": "pip install --index-" + "url here"},
        {"docs/a.md": "https://example.net/simple" + "/trio/"},
        {"docs/a.md": "from pypi" + ".org"},
        {"docs/a.md": f"see {ROOT}/README.md"},
    ],
    known_scenarios: [
        {SCENARIOS: "- **A1** x → y\n", "tests/a.py": "def test_a2_something(): ..."},
        {SCENARIOS: "- **A1** x → y\n", "tests/a.py": "async def test_a1_b7_something(): ..."},
        {SCENARIOS: "- **A1** x → y\n- **A1** z → y\n"},
    ],
    reasoned_sleeps: [
        {"tests/unit/a.py": "time.sleep(1)"},
        {"tests/unit/a.py": "async def test_x(nursery):\n    await trio.sleep(0.1)"},
        {"tests/actors/a.py": "time.sleep(1)"},
    ],
}

FINE: dict[Guard, list[Texts]] = {
    bounded_shields: [
        {"a.py": "with trio.CancelScope(shield=True):  # bounded: by the grace\n    pass"},
        {"a.py": "# A longer reason.\n# bounded: twice the grace\nscope.shield = True"},
        {
            "a.py": "with (\n    CancelScope(shield=True),\n    other(),\n):  # bounded: by the grace\n    pass"
        },
        {"a.py": "scope.shield = False"},
    ],
    plain_sql: [
        {"a.sql": "-- no select *, no now()\nselect count(*) from t where at < (select {schema}.clock())"}
    ],
    public_names: [{"a.py": "import trio\nfrom .b import B, f\nLIMIT = 1\n__all__ = ['LIMIT', 'B', 'f']"}],
    known_scenarios: [
        {SCENARIOS: "- **A1** x → y\n", "tests/a.py": "def test_a1_something(): ...\ndef test_plain(): ..."}
    ],
    reasoned_sleeps: [
        {"tests/actors/a.py": "await trio.sleep(9)"},
        {"tests/unit/a.py": "async def test_x(autojump_clock):\n    await trio.sleep(9)"},
        {"tests/unit/a.py": "time.sleep(1)  # because the server's clock cannot be moved"},
    ],
}


@pytest.mark.parametrize("guard", RULES, ids=lambda guard: guard.__name__)
def test_the_repository_keeps_the_rule(guard: Guard) -> None:
    assert guard(RULES[guard](repository())) == []


@pytest.mark.parametrize("guard", RULES, ids=lambda guard: guard.__name__)
def test_the_guard_refuses_what_breaks_its_rule(guard: Guard) -> None:
    for texts in SABOTAGE[guard]:
        assert guard(texts), f"not refused: {texts}"


@pytest.mark.parametrize("guard", FINE, ids=lambda guard: guard.__name__)
def test_the_guard_accepts_what_keeps_its_rule(guard: Guard) -> None:
    for texts in FINE[guard]:
        assert guard(texts) == []


def test_every_guard_reads_something() -> None:
    """A guard whose files were moved would pass for ever."""
    assert [guard.__name__ for guard, chosen in RULES.items() if not chosen(repository())] == []


@pytest.mark.parametrize("package", ["actors", "sqlstreams"])
def test_every_public_name_can_be_had(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def error_problems(classes: Iterable[type[Exception]], tree: str) -> list[str]:
    """Each error has a code of its own, says what it means and what to do, and stands in the module's drawn tree."""
    problems = []
    codes = Counter(vars(cls).get("code") for cls in classes)
    for cls in classes:
        own = vars(cls)
        code = own.get("code")
        if not re.fullmatch(r"SQLS-[A-Z]+(-[A-Z]+)*", str(code)):
            problems.append(f"{cls.__name__}: its code is {code!r}")
        elif codes[code] > 1:
            problems.append(f"{cls.__name__}: {code} is another error's code too")
        if not (own.get("__doc__") or "").strip():
            problems.append(f"{cls.__name__}: no docstring")
        if not str(own.get("what_to_do") or "").strip() or str(own.get("what_to_do")).endswith("."):
            problems.append(f"{cls.__name__}: what_to_do is not one sentence without its full stop")
        if not re.search(rf"\b{cls.__name__}\b", tree):
            problems.append(f"{cls.__name__}: not in the tree that the module's docstring draws")
    return problems


def error_classes() -> list[type[Exception]]:
    """Every error class that the module defines."""
    defined = vars(sqlstreams.errors).values()
    return [cls for cls in defined if isinstance(cls, type) and issubclass(cls, SQLStreamsError)]


def test_q6_every_error_has_its_own_code_and_says_what_to_do() -> None:
    classes = error_classes()
    assert len(classes) > 10
    assert error_problems(classes, sqlstreams.errors.__doc__ or "") == []
    assert {cls.__name__ for cls in classes} <= set(sqlstreams.errors.__all__)


GOOD_ERROR = {"code": "SQLS-GOOD", "what_to_do": "Nothing", "__doc__": "It is good."}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({}, None),
        ({"code": "OTHER"}, "its code is 'OTHER'"),
        ({"code": None}, "its code is None"),
        ({"what_to_do": ""}, "what_to_do"),
        ({"what_to_do": "Stop."}, "what_to_do"),
        ({"__doc__": None}, "no docstring"),
        ({"__name__": "Undrawn"}, "not in the tree"),
    ],
)
def test_the_error_guard_refuses_what_breaks_its_rule(
    wrong: dict[str, str | None], problem: str | None
) -> None:
    # These are not SQLStreamsErrors: `explain` lists every class below that one, in this process too.
    good = type("Good", (Exception,), dict(GOOD_ERROR))
    other = type("Other", (Exception,), GOOD_ERROR | {"code": "SQLS-BAD"} | wrong)
    other.__name__ = wrong.get("__name__") or "Other"
    problems = error_problems([good, other], "Good and Other")
    assert problems == [] if problem is None else any(problem in found for found in problems)


def test_the_error_guard_refuses_two_of_one_code() -> None:
    good = type("Good", (Exception,), dict(GOOD_ERROR))
    twin = type("Twin", (Exception,), dict(GOOD_ERROR))
    assert len(error_problems([good, twin], "Good and Twin")) == 2

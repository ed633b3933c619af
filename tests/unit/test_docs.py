"""The code in README.md and docs/ runs and prints what the page says.

docs/README.md tells writers the convention. The blocks of a page run in order, a process each, against one database
that is empty when the page starts. A page that breaks the convention fails; no block is left out in silence.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DEADLINE_SECONDS = 60


@dataclass(frozen=True)
class Block:
    """One fenced `python` block."""

    line: int
    code: str
    runs: bool
    prints: str | None


class BadPage(ValueError):
    """A page does not keep the convention."""


def blocks_of(page: str) -> list[Block]:
    """Return the python blocks of a page, each with what it is said to print.

    Raises: BadPage with the line, for an open fence, an unknown word after `python`, or `prints:` out of place.
    """
    found: list[Block] = []
    promised_at = 0  # the line of a `prints:` whose text block has not come yet
    after_code = False  # whether nothing but white space came since a python block
    for line, info, body in parts_of(page):
        if not (info or body.strip()):
            continue
        if promised_at and info != "text":
            raise BadPage(f"line {promised_at}: `prints:` is not followed by a text block")
        match info:
            case "python" | "python no-run":
                found.append(Block(line, body, info == "python", None))
            case str() if re.match(r"(python|py)\b", info):
                raise BadPage(f"line {line}: a fence says {info!r}; `python` and `python no-run` are known")
            case "text" if promised_at:
                found.append(replace(found.pop(), prints=body))
                promised_at = 0
            case None if body.strip().lower().startswith("prints:"):
                if not (after_code and found[-1].runs):
                    raise BadPage(f"line {line}: `prints:` does not follow a block that runs")
                promised_at = line
        after_code = info in ("python", "python no-run")
    if promised_at:
        raise BadPage(f"line {promised_at}: `prints:` is not followed by a text block")
    return found


def parts_of(page: str) -> Iterator[tuple[int, str | None, str]]:
    """Line, info string and body of each fenced block; line, None and text of each line between them."""
    lines = iter(enumerate(page.splitlines(), 1))
    for number, text in lines:
        fence = re.match(r"( *)(`{3,}|~{3,}) *(.*?) *$", text)
        if fence is None:
            yield number, None, text
            continue
        indent, ticks, info = fence.groups()
        body: list[str] = []
        for _, inner in lines:
            if inner.strip() == ticks:
                break
            body.append(inner.removeprefix(indent))
        else:
            raise BadPage(f"line {number}: a fence is never closed")
        yield number, info, "\n".join(body) + "\n"


def run(block: Block, folder: Path, dsn: str) -> None:
    """Run one block as a program; assert that it ends well and prints what was promised."""
    environment = os.environ | {"SQLSTREAMS_DATABASE_URL": dsn, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-"],
        input="\n" * block.line + block.code,  # so that a traceback names the line of the page
        cwd=folder,
        env=environment,
        timeout=DEADLINE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"line {block.line}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    if block.prints is not None:
        wanted = ".*".join(re.escape(part) for part in block.prints.strip().split("..."))
        assert re.fullmatch(wanted, done.stdout.strip(), re.DOTALL), (
            f"line {block.line}: it prints\n{done.stdout}and the page says\n{block.prints}"
        )


def pages() -> list[Path]:
    """README.md, and every page below docs/ that has a fence."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [README, *(page for page in docs if re.search(r"```|~~~", page.read_text("utf-8")))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_the_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    blocks = blocks_of(page.read_text("utf-8"))
    dsn = request.getfixturevalue("dsn") if any(block.runs for block in blocks) else ""
    for block in blocks:
        if block.runs:
            run(block, tmp_path, dsn)
        else:
            compile(block.code, f"{page.name}:{block.line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_readme_has_code_that_runs() -> None:
    assert any(block.runs for block in blocks_of(README.read_text("utf-8")))


GOOD_PAGE = """
```python
print("hello", 42)
```

prints:

```text
hello ...
```
"""


def test_a_block_gets_its_database_and_prints_what_is_promised(tmp_path: Path) -> None:
    block = blocks_of(GOOD_PAGE)[0]
    assert block == Block(2, 'print("hello", 42)\n', runs=True, prints="hello ...\n")
    run(block, tmp_path, "postgresql://nowhere")
    code = "import os; print(os.environ['SQLSTREAMS_DATABASE_URL'])"
    run(Block(1, code, runs=True, prints="postgresql://nowhere"), tmp_path, "postgresql://nowhere")


@pytest.mark.parametrize(
    "page",
    [
        GOOD_PAGE.replace("hello ...", "goodbye ..."),
        GOOD_PAGE.replace("hello ...", "hello"),
        GOOD_PAGE.replace("print(", "raise SystemExit("),
        GOOD_PAGE.replace("print(", "print(*"),
    ],
    ids=["other text", "more than promised", "exit code", "exception"],
)
def test_a_block_that_does_not_keep_the_promise_fails(page: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="line 2"):
        run(blocks_of(page)[0], tmp_path, "")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```python\npass\n", "line 1: a fence is never closed"),
        ("```python norun\npass\n```\n", "'python norun'"),
        ("```py\npass\n```\n", "'py'"),
        ("```python\npass\n```\n\nprints:\n\nnothing\n", "not followed by a text block"),
        ("```python\npass\n```\n\nprints:\n", "not followed by a text block"),
        ("```python\npass\n```\n\nBetween.\n\nprints:\n\n```text\nx\n```\n", "does not follow"),
        ("```python no-run\npass\n```\n\nprints:\n\n```text\nx\n```\n", "does not follow"),
        ("prints:\n\n```text\nx\n```\n", "does not follow"),
    ],
)
def test_a_page_that_breaks_the_convention_is_refused(page: str, problem: str) -> None:
    with pytest.raises(BadPage, match=re.escape(problem)):
        blocks_of(page)


def test_other_languages_and_text_are_left_alone() -> None:
    page = "```sh\nmake demo\n```\n\n```text\nx\n```\n\n```python no-run\nawait client.now\n```\n"
    assert blocks_of(page) == [Block(9, "await client.now\n", runs=False, prints=None)]

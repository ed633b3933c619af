"""Named SQL: loaded once from `sql/*.sql`, with the quoted schema and the stream's id put in, the only templating there is.

A file holds statements that start with `-- name: purpose`; everything else is a parameter.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from sqlstreams.model.names import quote_ident

__all__ = ["Statements"]

_START = re.compile(r"^-- ([a-z][a-z0-9_]*): ", re.MULTILINE)


class Statements:
    """The statements of one installation.

    Args:
        schema: the installation's schema, unquoted and already checked.
    """

    def __init__(self, schema: str) -> None:
        self.schema = quote_ident(schema)
        self._ready: dict[tuple[str, int], str] = {}

    def __call__(self, name: str, stream: int = 0) -> str:
        """Return a statement's text, for the tables of `stream` where it names some."""
        text = self._ready.get((name, stream))
        if text is None:
            text = self.fill(load()[name], stream)
            self._ready[name, stream] = text
        return text

    def script(self, name: str, stream: int = 0) -> str:
        """Return a whole file of `sql/schema/`, for a migration."""
        return self.fill(
            files(__package__).joinpath("sql", "schema", f"{name}.sql").read_text("utf-8"), stream
        )

    def fill(self, text: str, stream: int) -> str:
        """Put schema and stream id into a text."""
        return text.replace("{schema}", self.schema).replace("{stream}", str(int(stream)))


@cache
def load() -> dict[str, str]:
    """Return every named statement of the package; two of one name are an error."""
    found: dict[str, str] = {}
    for path in sorted(files(__package__).joinpath("sql").iterdir(), key=lambda entry: entry.name):
        if not path.name.endswith(".sql"):
            continue
        text = path.read_text("utf-8")
        starts = list(_START.finditer(text))
        for at, start in enumerate(starts):
            name = start.group(1)
            if name in found:
                raise ValueError(f"two statements are called {name}")
            end = starts[at + 1].start() if at + 1 < len(starts) else len(text)
            found[name] = text[start.start() : end].strip().removesuffix(";")
    return found

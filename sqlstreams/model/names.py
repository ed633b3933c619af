"""Which names streams, groups and schemas may have.

Names of streams and groups are data: always parameters, so quotes and every script are fine. A schema's name goes into
the text of statements, so it is narrow, and quoted all the same.

Source: docs/reference/names.md
"""

import re

from sqlstreams.errors import ConfigurationError

__all__ = ["MAX_NAME_BYTES", "SYSTEM_PREFIX", "check_name", "check_schema", "quote_ident"]

MAX_NAME_BYTES = 200  # of UTF-8
SYSTEM_PREFIX = "__system."
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,47}")  # 48: room for suffixes inside Postgres' 63 bytes
_SHOWN = 80  # characters of a refused name in an error


def check_name(kind: str, name: str, *, system: bool = False) -> None:
    """Refuse a name that a stream, group or schedule may not have; `kind` is the word for the error.

    Allowed are 1 to 200 bytes of UTF-8, printable (no control or invisible characters, no white space but the plain
    space), neither starting nor ending with a space, not starting with `__system.` unless `system`.

    Raises: ConfigurationError naming the rule.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"a name must be a str, not {type(name).__name__}", subject=kind)
    subject = f"{kind} {name[:_SHOWN]!a}"
    if not name:
        raise ConfigurationError("a name must not be empty", subject=subject)
    if not name.isprintable():  # lone surrogates are not printable either
        raise ConfigurationError("a name must consist of printable characters", subject=subject)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigurationError(f"a name must have at most {MAX_NAME_BYTES} bytes of UTF-8", subject=subject)
    if name != name.strip():
        raise ConfigurationError("a name must not start or end with white space", subject=subject)
    if name.startswith(SYSTEM_PREFIX) and not system:
        raise ConfigurationError(f"names that start with {SYSTEM_PREFIX} are reserved", subject=subject)


def check_schema(name: str) -> None:
    """Refuse a schema name that is not a plain lower-case identifier of at most 48 characters, or is Postgres' own.

    Raises: ConfigurationError naming the rule.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"a schema must be a str, not {type(name).__name__}", subject="schema")
    subject = f"schema {name[:_SHOWN]!a}"
    if not _SCHEMA.fullmatch(name):
        raise ConfigurationError(
            "a schema is 1 to 48 of a-z, 0-9 and _, the first one no digit", subject=subject
        )
    if name.startswith("pg_") or name == "information_schema":
        raise ConfigurationError("a schema must not be one of Postgres' own", subject=subject)


def quote_ident(name: str) -> str:
    """Return the name as a quoted SQL identifier. Raises ConfigurationError for U+0000 and the empty name."""
    if not name or "\x00" in name:
        raise ConfigurationError(
            "an identifier must be neither empty nor hold U+0000", subject=f"{name[:_SHOWN]!a}"
        )
    return '"' + name.replace('"', '""') + '"'

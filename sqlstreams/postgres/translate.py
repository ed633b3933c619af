"""Turns every error of the driver, the socket and the server into one of ours, from one table by SQLSTATE.

Guarantee   no payload and no password gets into our errors, their causes or their tracebacks.
Relies on   the server puts values into DETAIL, HINT and CONTEXT, which are never read here, and into the message of some
            SQLSTATEs, which is quoted only for those that name objects and settings; the driver quotes arguments and
            the database URL in the texts of its own errors, which are never quoted.

Raise the result outside the `except` block, so that the original is not even its context:

    except Exception as exc:
        if not is_database_error(exc):
            raise
        failure = translate(exc)
    raise failure

Source: https://www.postgresql.org/docs/current/errcodes-appendix.html
"""

import asyncio
import os
import re
import socket
import ssl

import asyncpg

from sqlstreams.errors import (
    AuthenticationFailed,
    ConfigurationError,
    Contended,
    GroupDamaged,
    LeaseLost,
    LogDamaged,
    NotFound,
    OutcomeUnknown,
    PartitionMissing,
    PermissionDenied,
    ServerRunChanged,
    SQLStreamsError,
    StatementRefused,
    StoreUnavailable,
)

__all__ = ["address", "is_database_error", "never_sent", "refused", "translate"]

CONNECTION_LOST = ("08", "40003", "57P")  # the server did not answer the statement: it may have been done
OURS: dict[str, type[SQLStreamsError]] = {  # raised by our own functions in the database
    "SQ001": ConfigurationError,  # an isolation level other than read committed
    "SQ002": LeaseLost,  # the node has ended
    "SQ003": GroupDamaged,
    "SQ004": LogDamaged,
    "SQ005": NotFound,
    "SQ006": ServerRunChanged,
    "SQ010": LeaseLost,  # another token
}
TABLE: dict[str, type[SQLStreamsError]] = {  # the longest prefix of the SQLSTATE decides
    "08": StoreUnavailable,
    "25006": StoreUnavailable,  # read-only: a standby, or a primary that is being replaced
    "25P03": StoreUnavailable,  # idle in a transaction for too long: the server hung up
    "28": AuthenticationFailed,
    "3D000": AuthenticationFailed,
    "40001": Contended,
    "40003": StoreUnavailable,
    "40P01": Contended,
    "42501": PermissionDenied,
    "53": StoreUnavailable,  # out of connections, memory or disk
    "55P03": Contended,
    "57P": StoreUnavailable,  # starting up, shutting down
}
# Their messages name objects, types and settings. Not quoted: 22 and 23 (values of rows), 42601 (a piece of the statement),
# P0 (whatever a trigger says), XX and all others.
QUOTED = ("08", "25", "28", "3D", "3F", "40", "42", "53", "55", "57", "SQ")
NOT_QUOTED = ("42601",)
LONGEST_QUOTE = 300

_ERRNO = re.compile(r"\[Errno (\d+)\]")
_HOSTS = re.compile(r"[\w.,:\[\]-]+")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def is_database_error(exc: BaseException) -> bool:
    """Say whether it comes from the driver, the socket or the server: `translate` knows it."""
    return isinstance(
        exc,
        asyncpg.PostgresError
        | asyncpg.InterfaceError
        | asyncpg.InternalClientError
        | OSError
        | asyncio.TimeoutError,
    )


def refused(exc: BaseException) -> bool:
    """Say whether it is certain that the statement which raised this was not done.

    The server itself said no, or the driver did before it sent anything. By exclusion: a connection that is lost under a
    statement shows in one of several errors.
    """
    if isinstance(exc, asyncpg.PostgresError):
        return not str(exc.sqlstate).startswith(CONNECTION_LOST)
    return isinstance(exc, asyncpg.InterfaceError) or never_sent(
        exc
    )  # the former are raised before anything is sent


def never_sent(exc: BaseException) -> bool:
    """Say whether the driver knew before it sent anything that the server had hung up on an idle connection."""
    text = str(exc.args[0]) if exc.args else ""
    if isinstance(exc, asyncpg.InterfaceError):
        return "connection is closed" in text or "has been released" in text
    # it has read the server's last words, and not the end of the connection yet
    return isinstance(exc, asyncpg.InternalClientError) and text.startswith("cannot switch to state")


def translate(exc: BaseException, *, subject: str | None = None, sent_last: bool = False) -> SQLStreamsError:
    """Return our error for one of the driver, the socket or the server; ours come back as they are.

    Args:
        exc: what was caught.
        subject: what it is about ("database server db1:5432"), for errors of ours that have none.
        sent_last: the statement that failed was the point of no return (a COMMIT, or an autocommit statement): unless
            the server refused it, the result is OutcomeUnknown.
    """
    if isinstance(exc, SQLStreamsError):
        return exc
    if sent_last and not refused(exc):
        return OutcomeUnknown(
            f"the connection failed under the last statement: {_what(exc)}", subject=subject
        )
    if isinstance(exc, asyncpg.PostgresError):
        return _of_server(exc, subject)
    if isinstance(exc, asyncpg.InterfaceError):
        return _of_driver(exc, subject)
    if isinstance(exc, asyncpg.InternalClientError | OSError | asyncio.TimeoutError):
        return StoreUnavailable(_what(exc), subject=subject)
    return StatementRefused(f"unexpected {type(exc).__name__}", subject=subject)


def address(dsn: str) -> str | None:
    """Return host and port of a database URL, None where they cannot be told from a password for certain."""
    scheme, mark, rest = dsn.partition("://")
    place, _, behind = rest.partition("/")
    hosts = place.rpartition("@")[2]
    known = bool(mark) and scheme in ("postgres", "postgresql") and _HOSTS.fullmatch(hosts) is not None
    return hosts if known and "@" not in behind else None  # else: a password with a slash in it, cut in two


def _of_server(exc: asyncpg.PostgresError, subject: str | None) -> SQLStreamsError:
    state = str(exc.sqlstate)
    if isinstance(exc, asyncpg.DataError) and _of_the_driver_itself(exc):
        text = "an argument does not fit the type of its parameter; nothing was sent"
        return StatementRefused(text, subject=subject, sqlstate=state)
    if state in OURS:
        return OURS[state](_quote(exc) or f"SQLSTATE {state}", subject=subject)
    for length in (5, 3, 2):
        if kind := TABLE.get(state[:length]):
            return kind(_what(exc), subject=subject)
    if state == "23514" and not exc.constraint_name:  # a check without a name: no partition takes the row
        return PartitionMissing("the log has no partition for the next ids", subject=subject)
    return StatementRefused(_what(exc), subject=subject, sqlstate=state)


def _of_driver(exc: asyncpg.InterfaceError, subject: str | None) -> SQLStreamsError:
    if isinstance(exc, asyncpg.DataError):
        return StatementRefused(
            "an argument does not fit the type of its parameter; nothing was sent", subject=subject
        )
    if isinstance(exc, ValueError):  # ClientConfigurationError
        return ConfigurationError(
            "the database URL or a setting in it is not valid", subject=subject or "database URL"
        )
    text = str(exc.args[0]) if exc.args else ""
    if "another operation" in text:
        return ConfigurationError(
            "a connection was used by two tasks at once; nothing was sent", subject=subject
        )
    if text.startswith("the server expects") or "number of query arguments" in text:
        return StatementRefused(f"{text}; nothing was sent", subject=subject)  # numbers only
    if (
        "authentication" in text.lower()
        or "server signature" in text
        or "gssapi" in text
        or "sspilib" in text
    ):
        return AuthenticationFailed("the server asks for a way to authenticate that failed", subject=subject)
    return StoreUnavailable(_what(exc), subject=subject)


def _what(exc: BaseException) -> str:
    """Describe an error by names and numbers only."""
    if isinstance(exc, asyncpg.PostgresError):
        return _describe(exc)
    if isinstance(exc, asyncio.TimeoutError):
        return "no answer in time"
    if never_sent(exc):
        return "the connection was lost before the statement"
    if isinstance(exc, asyncpg.TargetServerAttributeNotMatched):
        return "no server of the URL is what target_session_attrs asks for"
    if isinstance(exc, ssl.SSLError):
        return f"TLS failed: {getattr(exc, 'reason', None) or type(exc).__name__}"
    if isinstance(exc, socket.gaierror):
        return f"the host name cannot be resolved: {exc.strerror}"
    if isinstance(exc, OSError):
        numbers = {exc.errno} if exc.errno else {int(number) for number in _ERRNO.findall(str(exc))}
        return ", ".join(sorted(os.strerror(number) for number in numbers)) or "the connection was lost"
    return f"the driver failed: {type(exc).__name__}"


def _of_the_driver_itself(exc: asyncpg.PostgresError) -> bool:
    """The driver raises errors of the server's classes too; those have no fields."""
    return exc.severity is None


def _describe(exc: asyncpg.PostgresError) -> str:
    """Name condition, SQLSTATE and the objects it is about; quote the message where that can hold no values."""
    state = str(exc.sqlstate)
    if state == "08003" and _of_the_driver_itself(exc):  # its text may quote the server's
        return "the connection was lost"
    condition = _WORD.sub(" ", type(exc).__name__.removesuffix("Error")).lower()
    objects = [
        f"{kind} {name}"
        for kind, name in (
            ("constraint", exc.constraint_name),
            ("column", exc.column_name),
            ("table", exc.table_name),
            ("type", exc.data_type_name),
        )
        if name
    ]
    quote = _quote(exc) if state.startswith(QUOTED) and state not in NOT_QUOTED else ""
    return f"SQLSTATE {state} ({', '.join([condition, *objects])})" + (f": {quote}" if quote else "")


def _quote(exc: asyncpg.PostgresError) -> str:
    first = str(exc.args[0] if exc.args else "").partition("\n")[0].strip().rstrip(".")
    return first if len(first) <= LONGEST_QUOTE else first[:LONGEST_QUOTE] + "…"
